// Has one loaded library call other functions than those it was linked against.
#pragma once

#include <cstddef>

namespace tieroff {

// Replaces a function in the tables through which a loaded library calls others; other libraries are not touched.
// Returns the number of entries that are replaced: 0 where the library is not loaded, does not call that function, or calls
// another one in its place already (of a memory profiler, say, which would put it back at any time).
// Throws std::system_error when a table cannot be written.
//
// Args: `original` is what the function's name stands for in this process.
std::size_t interpose(const char* library, const char* function, void* original, void* replacement);

}  // namespace tieroff
