#include "torch/stacks.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <optional>
#include <vector>

#include "control/message.h"

namespace fusewire::binding {
namespace {

constexpr std::chrono::milliseconds kPolitePatience{350};

// Where questions wait for the Python thread. Lock order: `mutex` is a leaf; nobody holds it while taking the GIL.
struct Desk {
  std::mutex mutex;
  std::condition_variable changed;
  pid_t served_in = 0;  // the process whose thread serves, 0: none
  bool stopping = false;
  uint64_t asked = 0;
  uint64_t answered = 0;
  std::string answer;
  unsigned long main_thread = 0;  // pthread ids, as the dump names threads
  unsigned long own_thread = 0;

  static Desk& instance() {
    static Desk& desk = *new Desk;  // threads may outlive static destructors
    return desk;
  }
};

// nullopt: nobody could answer in time.
std::optional<std::string> ask_politely(Desk& desk) {
  std::unique_lock lock(desk.mutex);
  if (desk.served_in != ::getpid()) return "no thread that could tell its Python stacks runs in that process";
  const uint64_t number = ++desk.asked;
  desk.changed.notify_all();
  if (!desk.changed.wait_for(lock, kPolitePatience, [&] { return desk.answered >= number; })) return std::nullopt;
  return desk.answer;
}

// CPython's dump for fatal errors: all threads, the most recent call first, written without the GIL.
std::string dump() {
  using Dump = const char* (*)(int, PyInterpreterState*, PyThreadState*);
  const auto dump_threads = reinterpret_cast<Dump>(::dlsym(RTLD_DEFAULT, "_Py_DumpTracebackThreads"));
  if (dump_threads == nullptr) return "its Python stacks cannot be read while a C extension holds the GIL";
  const int file = ::memfd_create("fusewire-stacks", MFD_CLOEXEC);
  if (file < 0) return "its Python stacks cannot be read: no memory file";
  dump_threads(file, PyInterpreterState_Main(), nullptr);
  std::string text;
  char block[4096];
  for (off_t at = 0;;) {
    const ssize_t got = ::pread(file, block, sizeof block, at);
    if (got <= 0) break;
    text.append(block, static_cast<size_t>(got));
    at += got;
  }
  ::close(file);
  return text;
}

// One block per thread; the main thread's goes first, our own is left out.
std::string sort_threads(const std::string& text, unsigned long main_thread, unsigned long own_thread) {
  std::vector<std::string> blocks;
  for (size_t begin = 0; begin < text.size();) {
    const size_t next = text.find("\nThread 0x", begin);
    const size_t end = next == std::string::npos ? text.size() : next + 1;
    blocks.push_back(text.substr(begin, end - begin));
    begin = end;
  }
  const auto is_of = [](const std::string& block, unsigned long thread) {
    const size_t number = block.find("hread 0x");
    return number != std::string::npos && std::strtoul(block.c_str() + number + 6, nullptr, 16) == thread;
  };
  std::string main_block;
  std::string others;
  for (const std::string& block : blocks) {
    if (own_thread != 0 && is_of(block, own_thread)) continue;
    (is_of(block, main_thread) ? main_block : others) += block;
  }
  return "(a C extension holds the GIL; the most recent call is the first line)\n" + main_block + others;
}

// Serves questions with `describe` until stop_stacks(). Python calls it on a thread of its own.
void serve(const py::function& describe, unsigned long main_thread, unsigned long own_thread) {
  Desk& desk = Desk::instance();
  {
    const std::lock_guard lock(desk.mutex);
    desk.served_in = ::getpid();
    desk.stopping = false;
    desk.answered = desk.asked;
    desk.main_thread = main_thread;
    desk.own_thread = own_thread;
  }
  for (;;) {
    uint64_t number = 0;
    {
      py::gil_scoped_release no_gil;
      std::unique_lock lock(desk.mutex);
      desk.changed.wait(lock, [&] { return desk.stopping || desk.asked > desk.answered; });
      if (desk.stopping) {
        desk.served_in = 0;
        return;
      }
      number = desk.asked;
    }
    std::string text = describe().cast<std::string>();
    py::gil_scoped_release no_gil;
    const std::lock_guard lock(desk.mutex);
    desk.answer = std::move(text);
    desk.answered = number;
    desk.changed.notify_all();
  }
}

void stop() {
  Desk& desk = Desk::instance();
  const std::lock_guard lock(desk.mutex);
  desk.stopping = true;
  desk.changed.notify_all();
}

}  // namespace

std::string process_stacks() {
  Desk& desk = Desk::instance();
  std::string text;
  if (std::optional<std::string> polite = ask_politely(desk)) {
    text = std::move(*polite);
  } else {
    const auto [main_thread, own_thread] = [&] {
      const std::lock_guard lock(desk.mutex);
      return std::pair(desk.main_thread, desk.own_thread);
    }();
    text = sort_threads(dump(), main_thread, own_thread);
  }
  if (text.size() > kLongestActivity) text.resize(kLongestActivity);
  return text;
}

void register_stacks(py::module_& module) {
  module.def("serve_stacks", serve, py::arg("describe"), py::arg("main_thread"), py::arg("own_thread"),
             "Calls describe() on this thread whenever rank 0 asks what this process does, until stop_stacks().");
  module.def("stop_stacks", stop, py::call_guard<py::gil_scoped_release>());
  module.def("process_stacks", process_stacks, py::call_guard<py::gil_scoped_release>(),
             "What this rank answers when rank 0 asks what it does.");
}

}  // namespace fusewire::binding
