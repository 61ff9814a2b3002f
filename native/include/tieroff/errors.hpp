// Errors that are not the system's.
#pragma once

#include <stdexcept>

namespace tieroff {

// A call at a moment, or in a process, that does not allow it.
class StateError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace tieroff
