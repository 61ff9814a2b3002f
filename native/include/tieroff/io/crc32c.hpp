// CRC-32C (Castagnoli), the checksum of a tensor's bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tieroff {

// CRC of `size_bytes` at `data`, continuing from `crc` (0 for a new one). Takes the processor's instruction where it has
// one, else the table.
[[nodiscard]] std::uint32_t crc32c(const void* data, std::size_t size_bytes, std::uint32_t crc = 0) noexcept;

// The same by table, on any processor.
[[nodiscard]] std::uint32_t crc32c_table(const void* data, std::size_t size_bytes, std::uint32_t crc = 0) noexcept;

// CRC of two adjoining ranges from the CRC of each, so that chunks may be done in any order.
[[nodiscard]] std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_size_bytes) noexcept;

// Whether crc32c() uses an instruction of the processor.
[[nodiscard]] bool crc32c_is_hardware() noexcept;

}  // namespace tieroff
