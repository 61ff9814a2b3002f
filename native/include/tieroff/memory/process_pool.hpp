// The page pool of this process, and the allocations of other libraries that it serves.
#pragma once

#include <cstddef>

#include "tieroff/memory/page_pool.hpp"

namespace tieroff {

// The pool of this process, made by the first call. Throws std::system_error.
PagePool& process_pool(std::size_t reserved_bytes, bool has_huge_pages);

// From now on the library's calls of posix_memalign go to the pool when they ask for `serve_from` bytes or more, and its
// calls of free give back what came from there. For as long as the process lives: memory may be freed at any time.
// False where the library does not call both. Throws std::system_error.
bool serve_library(const char* library);

// Bytes from which allocations are served; SIZE_MAX (the start) serves none.
void serve_from(std::size_t size_bytes) noexcept;

}  // namespace tieroff
