// Memory of the host that the device may read and write by itself: registered by a program, or allocated as such.
#pragma once
#include <cstddef>
#include <cstdint>

#include "memory.hpp"

namespace sim {

// The codes of CUDA's runtime, so that what handles them is what would run there.
enum Code : int { kOk = 0, kInvalidValue = 1, kNoMemory = 2, kAlreadyRegistered = 712, kNotRegistered = 713 };

int host_register(void* address, size_t size);
int host_unregister(void* address);
void set_pin_limit(size_t bytes);
// A refused call leaves its error behind: whoever asks takes it, else the next kernel raises it.
int take_last_error();
void raise_last_error();

void* allocate_pinned(size_t size);
void free_pinned(void* address);  // where a copy is under way, once it is over
bool is_pinned(const void* address, size_t size);
bool has_pinned();
size_t pinned_bytes();
// Copies that touch a pinned block say so, from when they are queued until they are over.
void begin_flight(const void* address);
void end_flight(const void* address);

Held pinned_at(const void* address);
// The calling thread of the host, or an agent of it, reads or writes memory; checked where it is pinned.
void note_host_access(const void* address, size_t size, bool is_write, const char* name, const Actor* agent = nullptr);
void forget_pinned_accesses();

}  // namespace sim
