// Reading another process's memory, and noticing that it is not the one that was meant, or is gone.
#include "collective/peer_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

#include "shm_world.h"

namespace fusewire::testing {
namespace {

TEST(PeerMemory, ReadsAnotherProcess) {
  SharedPages shared(4096);
  auto* card = reinterpret_cast<MemoryCard*>(shared.data());
  std::vector<int> values(100'000);
  PeerMemory mine(2);
  int to_child[2];
  int from_child[2];
  ASSERT_EQ(pipe(to_child) + pipe(from_child), 0);
  char byte = 0;
  const pid_t child = fork();
  if (child == 0) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int>(i * 7);
    const PeerMemory own(2);
    *card = own.card();
    (void)!write(from_child[1], &byte, 1);
    (void)!read(to_child[0], &byte, 1);
    _exit(0);
  }
  ASSERT_EQ(read(from_child[0], &byte, 1), 1);
  MemoryCard stranger = *card;
  ++stranger.word;
  EXPECT_FALSE(mine.try_card(1, stranger));
  const bool allowed = mine.try_card(1, *card);  // some containers forbid it, and ranks then use slots
  if (allowed) {
    std::vector<int> copy(values.size());
    std::vector<PeerMemory::Copy> copies;
    for (size_t i = 0; i < values.size(); i += 500) {  // more than one call takes
      copies.push_back({reinterpret_cast<std::byte*>(&copy[i]), reinterpret_cast<std::byte*>(&values[i]), 2000});
    }
    EXPECT_TRUE(mine.read(1, copies));
    for (size_t i = 0; i < copy.size(); ++i) ASSERT_EQ(copy[i], static_cast<int>(i * 7));
  }
  ASSERT_EQ(write(to_child[1], &byte, 1), 1);
  int status = 0;
  waitpid(child, &status, 0);
  if (allowed) {
    EXPECT_FALSE(mine.read(1, {{reinterpret_cast<std::byte*>(values.data()), card->address, 8}}));
  }
  if (!allowed) GTEST_SKIP() << "process_vm_readv is not allowed here";
}

TEST(PeerMemory, MemoryThatIsNoLongerMappedIsGone) {
  PeerMemory mine(1);
  ASSERT_TRUE(mine.try_card(0, mine.card()));
  void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  munmap(page, 4096);
  int value = 0;
  EXPECT_FALSE(mine.read(0, {{reinterpret_cast<std::byte*>(&value), static_cast<std::byte*>(page), sizeof(value)}}));
}

}  // namespace
}  // namespace fusewire::testing
