#include "tieroff/io/crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace tieroff {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78U;  // 0x1EDC6F41 with its bits reversed

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1U) != 0 ? kPolynomial : 0U);
    table[byte] = value;
  }
  return table;
}

constexpr auto kTable = make_table();

// Product of two polynomials over GF(2), modulo the CRC's; bit 31 is the coefficient of x^0.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) noexcept {
  std::uint32_t product = 0;
  for (std::uint32_t mask = 1U << 31; mask != 0; mask >>= 1) {
    if ((a & mask) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1U) != 0 ? kPolynomial : 0U);
  }
  return product;
}

// x^(8 * size_bytes) modulo the CRC's polynomial, by repeated squaring.
std::uint32_t shift_by(std::uint64_t size_bytes) noexcept {
  std::uint32_t power = 1U << 23;   // x^8
  std::uint32_t result = 1U << 31;  // 1
  for (; size_bytes != 0; size_bytes >>= 1) {
    if ((size_bytes & 1U) != 0) result = multiply(result, power);
    power = multiply(power, power);
  }
  return result;
}

#if defined(__x86_64__)
[[gnu::target("sse4.2")]] std::uint32_t crc32c_hardware(const void* data, std::size_t size_bytes, std::uint32_t crc) noexcept {
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::uint64_t value = static_cast<std::uint32_t>(~crc);
  for (; size_bytes >= 8; size_bytes -= 8, bytes += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes, sizeof word);
    value = _mm_crc32_u64(value, word);
  }
  auto narrow = static_cast<std::uint32_t>(value);
  for (; size_bytes != 0; --size_bytes, ++bytes) narrow = _mm_crc32_u8(narrow, *bytes);
  return ~narrow;
}

bool has_instruction() noexcept { return __builtin_cpu_supports("sse4.2") != 0; }

#elif defined(__aarch64__)
#if defined(__clang__)
#define TIEROFF_CRC_TARGET gnu::target("crc")
#else
#define TIEROFF_CRC_TARGET gnu::target("+crc")
#endif
[[TIEROFF_CRC_TARGET]] std::uint32_t crc32c_hardware(const void* data, std::size_t size_bytes, std::uint32_t crc) noexcept {
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::uint32_t value = ~crc;
  for (; size_bytes >= 8; size_bytes -= 8, bytes += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes, sizeof word);
    value = __crc32cd(value, word);
  }
  for (; size_bytes != 0; --size_bytes, ++bytes) value = __crc32cb(value, *bytes);
  return ~value;
}

bool has_instruction() noexcept { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }

#else
std::uint32_t crc32c_hardware(const void* data, std::size_t size_bytes, std::uint32_t crc) noexcept {
  return crc32c_table(data, size_bytes, crc);
}

bool has_instruction() noexcept { return false; }
#endif

}  // namespace

bool crc32c_is_hardware() noexcept {
  static const bool kIsHardware = has_instruction();
  return kIsHardware;
}

std::uint32_t crc32c(const void* data, std::size_t size_bytes, std::uint32_t crc) noexcept {
  return crc32c_is_hardware() ? crc32c_hardware(data, size_bytes, crc) : crc32c_table(data, size_bytes, crc);
}

std::uint32_t crc32c_table(const void* data, std::size_t size_bytes, std::uint32_t crc) noexcept {
  const auto* bytes = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; size_bytes != 0; --size_bytes, ++bytes) crc = (crc >> 8) ^ kTable[(crc ^ *bytes) & 0xFFU];
  return ~crc;
}

std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_size_bytes) noexcept {
  return multiply(shift_by(second_size_bytes), first) ^ second;
}

}  // namespace tieroff
