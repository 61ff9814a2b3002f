// Threads of the module's own.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace tieroff {

// Starts a thread on which every signal is blocked: signals are for the program's own threads, and one that landed here
// would only interrupt a transfer. Of the name the system keeps 15 characters.
[[nodiscard]] std::thread start_service_thread(const std::string& name, std::function<void()> run);

}  // namespace tieroff
