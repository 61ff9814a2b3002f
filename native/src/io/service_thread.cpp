#include "tieroff/io/service_thread.hpp"

#include <pthread.h>

#include <csignal>
#include <utility>

namespace tieroff {
namespace {

// A new thread inherits what is blocked.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace

std::thread start_service_thread(const std::string& name, std::function<void()> run) {
  const SignalsBlocked blocked;
  std::thread thread(std::move(run));
  pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
  return thread;
}

}  // namespace tieroff
