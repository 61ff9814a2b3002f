// The page pool under many threads and a moving limit, for the sanitizers. Prints what failed and exits 1, else exits 0.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "expect.hpp"
#include "tieroff/memory/page_pool.hpp"

namespace {

constexpr std::size_t kPage = 4096;
std::array<tieroff::PagePool*, 2> pools{};  // they are never given back, and are no leaks

// Takes and gives back pieces that it marks at both ends, and looks at the marks before it gives one back.
void churn(tieroff::PagePool& pool, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::pair<unsigned char*, std::size_t>> held;
  const auto give_back = [&](std::size_t index) {
    const auto [memory, size] = held[index];
    EXPECT(memory[0] == static_cast<unsigned char>(seed) && memory[size - 1] == static_cast<unsigned char>(seed));
    pool.release(memory);
    held[index] = held.back();
    held.pop_back();
  };
  for (int i = 0; i < 4000; ++i) {
    if (!held.empty() && random() % 2 == 0) give_back(random() % held.size());
    const std::size_t size = 1 + random() % (random() % 8 == 0 ? 1024 * kPage : 16 * kPage);
    auto* memory = static_cast<unsigned char*>(pool.allocate(size));
    if (memory == nullptr) continue;
    EXPECT(pool.owns(memory) && pool.owns(memory + size - 1));
    memory[0] = memory[size - 1] = static_cast<unsigned char>(seed);
    held.emplace_back(memory, size);
    if (held.size() > 24) give_back(random() % held.size());
  }
  while (!held.empty()) give_back(0);
}

void test_many_threads(bool has_huge_pages) {
  auto& pool = *new tieroff::PagePool(std::size_t{512} << 20, has_huge_pages);
  pools.at(has_huge_pages ? 1 : 0) = &pool;
  std::vector<std::thread> threads;
  for (std::uint64_t seed = 1; seed <= 4; ++seed) threads.emplace_back([&pool, seed] { churn(pool, seed); });
  for (std::size_t limit : {std::size_t{0}, std::size_t{8} << 20, std::size_t{64} << 20, std::size_t{1} << 20, SIZE_MAX}) {
    pool.set_limit(limit);
    std::this_thread::yield();
  }
  for (auto& thread : threads) thread.join();
  EXPECT(pool.usage().in_use_bytes == 0);
  pool.set_limit(0);
  EXPECT(pool.usage().kept_bytes == 0);
  EXPECT(!pool.owns(&pool) && !pool.owns(nullptr));
}

}  // namespace

int main() {
  test_many_threads(false);
  test_many_threads(true);
  return failures.load() == 0 ? 0 : 1;
}
