// Every knob: its default, both of its variables, its init() keyword, and the error for a bad value.
#include "common/config.h"

#include <gtest/gtest.h>

#include <map>

#include "common/error.h"

namespace fusewire {
namespace {

using Environment = std::map<std::string, std::string>;

Config read(const Environment& environment) {
  return Config::from_environment([&](const std::string& name) -> std::optional<std::string> {
    const auto found = environment.find(name);
    if (found == environment.end()) return std::nullopt;
    return found->second;
  });
}

struct Knob {
  std::string keyword;
  std::string variable;
  std::string horovod;  // "" where Horovod has no such knob
  double fallback;
  std::map<std::string, double> good;
  std::vector<std::string> bad;
  std::string allowed;  // part of the error
  std::function<double(const Config&)> get;
};

std::ostream& operator<<(std::ostream& out, const Knob& knob) { return out << knob.keyword; }

const std::vector<std::string> kNoInteger = {"",     " ",  "x",  "1.5",  "1e6",
                                             "64MB", " 4", "4 ", "0x10", "99999999999999999999"};
const std::vector<std::string> kNoSeconds = {"", "soon", "-1", "-0.5", "nan", "inf", "1e300", "5s", " 5", "1000000001"};

std::vector<std::string> with(std::vector<std::string> values, const std::vector<std::string>& more) {
  values.insert(values.end(), more.begin(), more.end());
  return values;
}

double level(LogLevel value) { return static_cast<double>(value); }

std::vector<Knob> knobs() {
  return {
      {"fusion_threshold",
       "FUSEWIRE_FUSION_THRESHOLD",
       "HOROVOD_FUSION_THRESHOLD",
       64.0 * (1 << 20),
       {{"0", 0}, {"1048576", 1048576}},
       with(kNoInteger, {"-1"}),
       "a whole number from 0",
       [](const Config& c) { return static_cast<double>(c.fusion_threshold); }},
      {"cache_capacity",
       "FUSEWIRE_CACHE_CAPACITY",
       "HOROVOD_CACHE_CAPACITY",
       4096,
       {{"0", 0}, {"2", 2}},
       with(kNoInteger, {"-1", "4294967296"}),
       "a whole number from 0",
       [](const Config& c) { return static_cast<double>(c.cache_capacity); }},
      {"stall_check_time",
       "FUSEWIRE_STALL_CHECK_TIME",
       "HOROVOD_STALL_CHECK_TIME_SECONDS",
       60,
       {{"0", 0}, {"2.5", 2.5}, {"1e2", 100}},
       kNoSeconds,
       "seconds from 0 (off)",
       [](const Config& c) { return c.stall_check_seconds; }},
      {"stall_abort_time",
       "FUSEWIRE_STALL_ABORT_TIME",
       "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
       1800,
       {{"0", 0}, {"0.25", 0.25}},
       kNoSeconds,
       "seconds from 0 (off)",
       [](const Config& c) { return c.stall_abort_seconds; }},
      {"spin_us",
       "FUSEWIRE_SPIN_US",
       "",
       -1,
       {{"-1", -1}, {"0", 0}, {"50", 50}},
       with(kNoInteger, {"-2", "1000001"}),
       "a whole number from -1",
       [](const Config& c) { return static_cast<double>(c.spin_us); }},
      {"inline_limit",
       "FUSEWIRE_INLINE_LIMIT",
       "",
       256 << 10,
       {{"0", 0}, {"65536", 65536}},
       with(kNoInteger, {"-1"}),
       "a whole number from 0",
       [](const Config& c) { return static_cast<double>(c.inline_limit); }},
      {"shm_chunk",
       "FUSEWIRE_SHM_CHUNK",
       "",
       0,
       {{"131072", 131072}},
       with(kNoInteger, {"-1"}),
       "a whole number from 0",
       [](const Config& c) { return static_cast<double>(c.shm_chunk); }},
      {"backend",
       "FUSEWIRE_BACKEND",
       "",
       0,
       {{"auto", 0}, {"shm", 1}, {"mpi", 2}},
       {"", "SHM", "nccl2"},
       "auto, shm, mpi",
       [](const Config& c) { return c.backend == "shm"   ? 1.0
                                    : c.backend == "mpi" ? 2.0
                                                         : 0.0; }},
      {"gpu_backend",
       "FUSEWIRE_GPU_BACKEND",
       "",
       0,
       {{"auto", 0}, {"nccl", 1}, {"staged", 2}},
       {"", "NCCL", "shm"},
       "auto, nccl, staged",
       [](const Config& c) { return c.gpu_backend == "nccl"     ? 1.0
                                    : c.gpu_backend == "staged" ? 2.0
                                                                : 0.0; }},
      {"mpi_module",
       "FUSEWIRE_MPI_MODULE",
       "",
       0,
       {{"modules/_mpi.so", 15}},
       {},
       "",
       [](const Config& c) { return static_cast<double>(c.mpi_module.size()); }},
      {"log_level",
       "FUSEWIRE_LOG_LEVEL",
       "HOROVOD_LOG_LEVEL",
       level(LogLevel::kWarning),
       {{"trace", level(LogLevel::kTrace)},
        {"DEBUG", level(LogLevel::kDebug)},
        {"Info", level(LogLevel::kInfo)},
        {"warning", level(LogLevel::kWarning)},
        {"error", level(LogLevel::kError)},
        {"fatal", level(LogLevel::kError)},
        {"off", level(LogLevel::kOff)}},
       {"", "loud", "3", "warning "},
       "trace, debug, info, warning, error, off",
       [](const Config& c) { return level(c.log_level); }},
  };
}

class ConfigKnob : public ::testing::TestWithParam<Knob> {};

TEST_P(ConfigKnob, HasADefault) { EXPECT_EQ(GetParam().get(read({})), GetParam().fallback); }

TEST_P(ConfigKnob, IsReadFromItsVariable) {
  const Knob& knob = GetParam();
  for (const auto& [text, value] : knob.good) {
    EXPECT_EQ(knob.get(read({{knob.variable, text}})), value) << text;
    Config config;
    config.set(knob.keyword, text);
    EXPECT_EQ(knob.get(config), value) << text;
  }
}

TEST_P(ConfigKnob, HonoursHorovodsNameWhenOursIsNotSet) {
  const Knob& knob = GetParam();
  if (knob.horovod.empty()) {
    // "FUSEWIRE_X" has no "HOROVOD_X" that means anything.
    const std::string other = "HOROVOD" + knob.variable.substr(knob.variable.find('_'));
    EXPECT_EQ(knob.get(read({{other, knob.good.rbegin()->first}})), knob.fallback);
    return;
  }
  for (const auto& [text, value] : knob.good) {
    EXPECT_EQ(knob.get(read({{knob.horovod, text}})), value) << text;
    EXPECT_EQ(knob.get(read({{knob.variable, text}, {knob.horovod, "whatever"}})), value) << text;
  }
}

TEST_P(ConfigKnob, ErrorsNameTheVariableTheValueAndWhatIsAllowed) {
  const Knob& knob = GetParam();
  for (const std::string& text : knob.bad) {
    const auto expect_error = [&](const std::string& name, const std::function<void()>& action) {
      try {
        action();
        ADD_FAILURE() << name << "=" << text << " was accepted";
      } catch (const Error& error) {
        const std::string message = error.what();
        EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
        EXPECT_NE(message.find(name + "=" + text + " "), std::string::npos) << message;
        EXPECT_NE(message.find("allowed: " + knob.allowed), std::string::npos) << message;
      }
    };
    expect_error(knob.variable, [&] { read({{knob.variable, text}}); });
    if (!knob.horovod.empty()) expect_error(knob.horovod, [&] { read({{knob.horovod, text}}); });
    Config config;
    expect_error(knob.keyword, [&] { config.set(knob.keyword, text); });
    EXPECT_EQ(knob.get(config), knob.fallback) << "a rejected value changes nothing";
  }
}

INSTANTIATE_TEST_SUITE_P(All, ConfigKnob, ::testing::ValuesIn(knobs()),
                         [](const auto& info) { return info.param.keyword; });

TEST(Config, HorovodsSwitchForTheStallCheck) {
  EXPECT_EQ(read({{"HOROVOD_STALL_CHECK_DISABLE", "1"}}).stall_check_seconds, 0);
  EXPECT_EQ(read({{"HOROVOD_STALL_CHECK_DISABLE", "0"}}).stall_check_seconds, 60);
  EXPECT_EQ(read({{"HOROVOD_STALL_CHECK_DISABLE", "1"}, {"HOROVOD_STALL_CHECK_TIME_SECONDS", "5"}}).stall_check_seconds,
            0);
  EXPECT_EQ(read({{"HOROVOD_STALL_CHECK_DISABLE", "1"}, {"FUSEWIRE_STALL_CHECK_TIME", "5"}}).stall_check_seconds, 5);
  EXPECT_THROW(read({{"HOROVOD_STALL_CHECK_DISABLE", "yes"}}), Error);
}

TEST(Config, AnUnknownKeywordIsAnErrorThatListsTheKnownOnes) {
  Config config;
  try {
    config.set("fusion_treshold", "1");
    FAIL();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("'fusion_treshold'"), std::string::npos) << message;
    for (const Knob& knob : knobs()) EXPECT_NE(message.find(knob.keyword), std::string::npos) << message;
  }
}

TEST(Config, TheProcessEnvironment) {
  ASSERT_EQ(setenv("FUSEWIRE_CACHE_CAPACITY", "17", 1), 0);
  EXPECT_EQ(Config::from_environment().cache_capacity, 17);
  ASSERT_EQ(unsetenv("FUSEWIRE_CACHE_CAPACITY"), 0);
  EXPECT_EQ(Config::from_environment().cache_capacity, 4096);
}

TEST(Config, WhetherNcclSharesGpusIsItsOwnKnob) {
  EXPECT_FALSE(read({}).nccl_shares_gpus);
  EXPECT_FALSE(read({{"NCCL_MULTI_RANK_GPU_ENABLE", "0"}}).nccl_shares_gpus);
  EXPECT_TRUE(read({{"NCCL_MULTI_RANK_GPU_ENABLE", "1"}}).nccl_shares_gpus);
}

}  // namespace
}  // namespace fusewire
