// Log lines: which are written, how they look, and that threads do not interleave them.
#include "common/logging.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <thread>
#include <vector>

namespace fusewire {
namespace {

TEST(Logger, WritesOnlyWhatItsLevelAllows) {
  std::vector<std::string> lines;
  const auto sink = [&](LogLevel, std::string_view line) { lines.emplace_back(line); };
  const Logger logger(LogLevel::kInfo, 3, sink);
  logger.debug("no");
  logger.info("a");
  logger.warning("b");
  logger.log(LogLevel::kError, "c");
  EXPECT_EQ(lines, (std::vector<std::string>{"[fusewire rank 3] info: a\n", "[fusewire rank 3] warning: b\n",
                                             "[fusewire rank 3] error: c\n"}));
  lines.clear();
  const Logger off(LogLevel::kOff, 0, sink);
  off.log(LogLevel::kError, "no");
  off.log(LogLevel::kOff, "no");
  EXPECT_FALSE(off.enabled(LogLevel::kError));
  EXPECT_TRUE(lines.empty());
}

TEST(Logger, WithoutARankAndWithoutASink) {
  ::testing::internal::CaptureStderr();
  Logger().warning("no rank yet");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "[fusewire] warning: no rank yet\n");
}

TEST(Logger, LinesOfManyThreadsStayWhole) {
  ::testing::internal::CaptureStderr();
  const std::string text(300, 'x');
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] {
      for (int i = 0; i < 200; ++i) Logger(LogLevel::kWarning, rank).warning(text);
    });
  }
  for (auto& thread : threads) thread.join();
  std::istringstream log(::testing::internal::GetCapturedStderr());
  std::vector<int> count(4, 0);
  for (std::string line; std::getline(log, line);) {
    const size_t rank = static_cast<size_t>(line.at(15) - '0');
    ASSERT_EQ(line, "[fusewire rank " + std::to_string(rank) + "] warning: " + text);
    ++count.at(rank);
  }
  EXPECT_TRUE(std::all_of(count.begin(), count.end(), [](int n) { return n == 200; }));
}

}  // namespace
}  // namespace fusewire
