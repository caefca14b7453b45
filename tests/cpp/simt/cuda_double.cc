#include "simt/cuda_double.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/types.h"
#include "kernels/cuda_tables.h"

namespace fusewire::testing {
namespace {

size_t bytes_of(DataType type) {
  switch (type) {
    case DataType::kComplex64:
    case DataType::kComplex128:
      return size_of(type) / 2;  // tables count real numbers
    default:
      return size_of(type);
  }
}

}  // namespace

thread_local const CudaDouble* CudaDouble::current_ = nullptr;

CudaDouble::CudaDouble(uint64_t seed, std::shared_ptr<CudaWorld> world) : world_(std::move(world)), random_(seed) {
  if (world_) world_->add(*this);
}

CudaDouble::~CudaDouble() {
  if (world_) world_->remove(*this);
  const std::lock_guard lock(mutex_);
  while (step()) {
  }
}

void CudaDouble::mistake(std::string sentence) { mistakes_.push_back(std::move(sentence)); }

std::vector<std::string> CudaDouble::mistakes() const {
  const std::lock_guard lock(mutex_);
  return mistakes_;
}

void CudaDouble::join(Clock& into, const Clock& other) {
  for (const auto& [stream, number] : other) into[stream] = std::max(into[stream], number);
}

CudaApi::Stream CudaDouble::create_stream() {
  const std::lock_guard lock(mutex_);
  streams_.push_back(std::make_unique<StreamState>());
  streams_.back()->number = next_stream_++;
  return streams_.back().get();
}

void CudaDouble::destroy_stream(Stream stream) {
  const std::lock_guard lock(mutex_);
  while (!stream_of(stream).queue.empty() && step()) {
  }
  std::erase_if(streams_, [&](const auto& one) { return one.get() == stream; });
}

CudaApi::Event CudaDouble::create_event(bool timed) {
  const std::lock_guard lock(mutex_);
  events_.push_back(std::make_unique<EventState>());
  events_.back()->timed = timed;
  return events_.back().get();
}

void CudaDouble::destroy_event(Event event) {
  const std::lock_guard lock(mutex_);
  std::erase_if(events_, [&](const auto& one) { return one.get() == event; });
}

void CudaDouble::record(Event event, Stream stream) {
  const std::lock_guard lock(mutex_);
  auto snapshot = std::make_shared<Snapshot>();
  event_of(event).last = snapshot;
  snapshot->timed = event_of(event).timed;
  StreamState& on = stream_of(stream);
  join(on.clock, host_);
  snapshot->clock = on.clock;
  on.queue.push_back({.run = nullptr, .waits_for = nullptr, .reaches = snapshot});
  some_steps();
}

void CudaDouble::wait(Stream stream, Event event) {
  const std::lock_guard lock(mutex_);
  const auto& snapshot = event_of(event).last;
  if (snapshot == nullptr) return mistake("a stream waits for an event that was never recorded: it waits for nothing");
  StreamState& on = stream_of(stream);
  join(on.clock, snapshot->clock);
  on.queue.push_back({.run = nullptr, .waits_for = snapshot, .reaches = nullptr});
  some_steps();
}

bool CudaDouble::reached(Event event) {
  if (world_) world_->step();  // who asks again and again waits for others, too
  const std::lock_guard lock(mutex_);
  some_steps();
  const auto& snapshot = event_of(event).last;
  if (snapshot == nullptr) {
    mistake("the host asks for an event that was never recorded: it counts as reached");
    return true;
  }
  if (snapshot->reached) join(host_, snapshot->clock);
  return snapshot->reached;
}

void CudaDouble::synchronize(Event event) {
  std::shared_ptr<Snapshot> snapshot;
  {
    const std::lock_guard lock(mutex_);
    snapshot = event_of(event).last;
    if (snapshot == nullptr) {
      return mistake("the host waits for an event that was never recorded: it waits for nothing");
    }
  }
  until([&] { return snapshot->reached; });
  const std::lock_guard lock(mutex_);
  join(host_, snapshot->clock);
}

// Called without the mutex, or nobody else could let this GPU go on.
void CudaDouble::until(const std::function<bool()>& done) {
  for (;;) {
    const uint64_t changes = world_ ? world_->changes() : 0;
    {
      const std::lock_guard lock(mutex_);
      while (!done() && step()) {
      }
      if (done() || !world_ || !waits_for_others()) return;
    }
    if (!world_->step()) world_->wait(changes);
  }
}

bool CudaDouble::waits_for_others() {
  return std::any_of(streams_.begin(), streams_.end(),
                     [](const auto& one) { return !one->queue.empty() && one->queue.front().ready != nullptr; });
}

bool CudaDouble::step_if_possible() {
  const std::lock_guard lock(mutex_);
  return step();
}

void CudaDouble::with_current(const std::function<void()>& function) {
  struct Restore {
    const CudaDouble* before;
    ~Restore() { current_ = before; }
  } const restore{std::exchange(current_, this)};
  function();
}

size_t CudaDouble::launched(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto found = launched_.find(name);
  return found == launched_.end() ? 0 : found->second;
}

double CudaDouble::elapsed_ms(Event from, Event to) {
  const std::lock_guard lock(mutex_);
  const auto& first = event_of(from).last;
  const auto& last = event_of(to).last;
  if (!first || !last || !first->timed || !last->timed || !first->reached || !last->reached) {
    mistake("the time between events is asked for that were not both timed, recorded and reached");
    return 0;
  }
  return static_cast<double>(static_cast<int64_t>(last->at - first->at));
}

void CudaDouble::call(Stream stream, void (*function)(void*), void* argument) {
  launch("a host function", stream, {}, [=] { function(argument); });
}

bool CudaDouble::capturing(Stream stream) {
  const std::lock_guard lock(mutex_);
  return stream_of(stream).capturing;
}

void CudaDouble::capture(Stream stream, bool on) {
  const std::lock_guard lock(mutex_);
  stream_of(stream).capturing = on;
}

void CudaDouble::hold(Stream stream, bool on) {
  const std::lock_guard lock(mutex_);
  stream_of(stream).held = on;
}

void* CudaDouble::take(size_t bytes, bool pinned) {
  const std::lock_guard lock(mutex_);
  auto memory = std::make_unique<unsigned char[]>(bytes + 1);
  std::memset(memory.get(), 0xdb, bytes);
  void* const at = memory.get();
  allocations_.emplace(at, Allocation{std::move(memory), bytes, pinned});
  return at;
}

void CudaDouble::release(void* memory, bool pinned) {
  const std::lock_guard lock(mutex_);
  const auto found = allocations_.find(memory);
  if (found == allocations_.end() || found->second.pinned != pinned) {
    return mistake("memory is freed that was not allocated, or as the wrong kind");
  }
  const size_t before = mistakes_.size();
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const Access all{"free", begin, begin + found->second.size, true, kHost, ++host_number_};
  check(all, host_);
  // What comes next may be given the same addresses.
  std::erase_if(accesses_, [&](const Access& one) { return one.begin < all.end && all.begin < one.end; });
  // Work that is still to come would write to memory of others: a mistake is enough.
  if (mistakes_.size() > before) drain();
  allocations_.erase(found);
}

void CudaDouble::forget(const void* memory, size_t bytes, Stream stream) {
  const std::lock_guard lock(mutex_);
  const size_t before = mistakes_.size();
  launch("free", stream, {{memory, bytes, true}}, nullptr);
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  std::erase_if(accesses_, [&](const Access& one) { return one.begin < begin + bytes && begin < one.end; });
  mistakes_.size() > before ? drain() : finish(stream);
}

void* CudaDouble::allocate(size_t bytes) { return take(bytes, false); }
void CudaDouble::free(void* memory) { release(memory, false); }
void* CudaDouble::allocate_pinned(size_t bytes) { return take(bytes, true); }
void CudaDouble::free_pinned(void* memory) { release(memory, true); }

void CudaDouble::copy(void* to, const void* from, size_t bytes, Stream stream) {
  put("copy", stream, {{from, bytes, false}, {to, bytes, true}},
      {.run = [=] { std::memcpy(to, from, bytes); },
       .waits_for = nullptr,
       .reaches = nullptr,
       .copies_to = to,
       .copies_from = from});
}

void CudaDouble::fill(void* memory, int byte, size_t bytes, Stream stream) {
  launch("fill", stream, {{memory, bytes, true}}, [=] { std::memset(memory, byte, bytes); });
}

void CudaDouble::pack(const TransferArgs& args) {
  launch("pack", args.stream, uses_of(args, true), [args] { kCudaKernels.pack(args); });
}

void CudaDouble::unpack(const TransferArgs& args) {
  launch("unpack", args.stream, uses_of(args, false), [args] { kCudaKernels.unpack(args); });
}

void CudaDouble::reduce(const DeviceReduceArgs& args) {
  const size_t bytes = args.count * size_of(args.dtype);
  std::vector<Use> uses = {{args.destination, bytes, true}};
  for (int s = 0; s < args.source_count; ++s) uses.push_back({args.sources[s], bytes, false});
  launch("reduce", args.stream, std::move(uses), [args] { kCudaKernels.reduce(args); });
}

void CudaDouble::dot(const DeviceDotArgs& args) {
  std::vector<Use> uses = span_uses(args.table, args.spans, args.sources, args.source_count, args.dtype);
  const auto pairs = static_cast<size_t>(args.source_count * (args.source_count + 1) / 2);
  uses.push_back({args.dots, args.spans * pairs * sizeof(double), true});
  uses.push_back({args.partials, args.slots * pairs * sizeof(double), true});
  uses.push_back({args.arrivals, args.spans * sizeof(uint32_t), true});
  launch("dot", args.stream, std::move(uses), [args] { kCudaKernels.dot(args); });
}

void CudaDouble::combine(const DeviceCombineArgs& args) {
  std::vector<Use> uses = span_uses(args.table, args.spans, args.sources, args.source_count, args.dtype);
  const std::vector<Use> written = span_uses(args.table, args.spans, &args.destination, 1, args.dtype);
  for (const Use& use : written) uses.push_back({use.memory, use.bytes, use.memory != args.table});
  const auto count = static_cast<size_t>(args.source_count);
  if (args.coefficients != nullptr) {
    uses.push_back({args.coefficients, args.spans * count * sizeof(double), false});
  } else {
    uses.push_back({args.dots, args.spans * size_t{3} * sizeof(double), false});
  }
  launch("combine", args.stream, std::move(uses), [args] { kCudaKernels.combine(args); });
}

void CudaDouble::quantise(const DeviceQuantiseArgs& args) {
  const size_t error = args.count * (args.dtype == DataType::kFloat64 ? sizeof(double) : sizeof(float));
  const uint64_t blocks = (args.count + args.block - 1) / args.block;
  launch("quantise", args.stream,
         {{args.values, args.count * size_of(args.dtype), false},
          {args.error_in, args.error_in != nullptr ? error : 0, false},
          {args.error_out, args.error_out != nullptr ? error : 0, true},
          {args.quantised, blocks * args.block, true},
          {args.scales, blocks * sizeof(float), true}},
         [args] { kCudaKernels.quantise(args); });
}

void CudaDouble::dequantise(const DeviceDequantiseArgs& args) {
  const uint64_t blocks = (args.count + args.block - 1) / args.block;
  launch("dequantise", args.stream,
         {{args.quantised, args.payloads * blocks * args.block, false},
          {args.scales, args.payloads * blocks * sizeof(float), false},
          {args.total, args.count * size_of(args.dtype), true}},
         [args] { kCudaKernels.dequantise(args); });
}

const void* CudaDouble::content_of(const void* table) const {
  const std::lock_guard lock(mutex_);
  const void* content = table;
  for (const auto& stream : streams_) {
    for (const Work& work : stream->queue) {
      if (work.copies_to == table) content = work.copies_from;
    }
  }
  return content;
}

void CudaDouble::finish(Stream stream) {
  const std::lock_guard lock(mutex_);
  while (!stream_of(stream).queue.empty() && step()) {
  }
}

// The table's spans in each of the buffers.
std::vector<CudaDouble::Use> CudaDouble::span_uses(const void* table, uint32_t spans, const void* const* sources,
                                                   int count, DataType dtype) const {
  const auto* bytes = static_cast<const unsigned char*>(content_of(table));
  const auto* first = reinterpret_cast<const cuda::Span*>(bytes + cuda::pieces_offset(spans));
  std::vector<Use> uses = {{table, cuda::pieces_offset(spans) + spans * sizeof(cuda::Span), false}};
  for (uint32_t s = 0; s < spans; ++s) {
    for (int source = 0; source < count; ++source) {
      uses.push_back({static_cast<const unsigned char*>(sources[source]) + first[s].begin * size_of(dtype),
                      first[s].count * size_of(dtype), false});
    }
  }
  return uses;
}

// From the table as it is now. A strided tensor counts with the elements between its own, too.
std::vector<CudaDouble::Use> CudaDouble::uses_of(const TransferArgs& args, bool packs) const {
  const auto* table = static_cast<const unsigned char*>(content_of(args.table));
  const auto* pieces = reinterpret_cast<const cuda::Piece*>(table + cuda::pieces_offset(args.pieces));
  const auto* layouts = reinterpret_cast<const cuda::Layout*>(table + cuda::layouts_offset(args.pieces));
  std::vector<Use> uses = {{args.table, cuda::layouts_offset(args.pieces), false}};
  for (uint32_t p = 0; p < args.pieces; ++p) {
    const cuda::Piece& piece = pieces[p];
    const auto* buffer = static_cast<const unsigned char*>(args.buffer) + piece.buffer;
    uses.push_back({buffer, piece.count * bytes_of(args.wire), packs});
    if (piece.tensor == 0) continue;
    uint64_t extent = piece.count;
    if (piece.layout != 0) {
      const cuda::Layout& layout = layouts[piece.layout - 1];
      extent = 1;
      for (int d = 0; d < layout.dims; ++d) {
        extent += (layout.sizes[d].divisor - 1) * static_cast<uint64_t>(layout.strides[d]);
      }
    }
    uses.push_back({reinterpret_cast<const void*>(piece.tensor), extent * bytes_of(args.dtype), !packs});
  }
  return uses;
}

void CudaDouble::launch(const std::string& name, Stream stream, std::vector<Use> uses, std::function<void()> work) {
  put(name, stream, uses, {.run = std::move(work), .waits_for = nullptr, .reaches = nullptr});
}

void CudaDouble::launch_when(const std::string& name, Stream stream, std::vector<Use> uses,
                             std::function<bool()> ready) {
  put(name, stream, uses, {.run = nullptr, .waits_for = nullptr, .reaches = nullptr, .ready = std::move(ready)});
}

void CudaDouble::put(const std::string& name, Stream stream, const std::vector<Use>& uses, Work work) {
  const std::lock_guard lock(mutex_);
  StreamState& on = stream_of(stream);
  join(on.clock, host_);
  const uint64_t number = on.clock[on.number] + 1;
  for (const Use& use : uses) {
    const auto begin = reinterpret_cast<uintptr_t>(use.memory);
    note({name, begin, begin + use.bytes, use.writes, on.number, number}, on.clock);
  }
  on.clock[on.number] = number;
  on.queue.push_back(std::move(work));
  ++launched_[name];
  if (world_) world_->changed();
  some_steps();
}

void CudaDouble::host_uses(const void* memory, size_t bytes, bool writes) {
  const std::lock_guard lock(mutex_);
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const Access access{"the host", begin, begin + bytes, writes, kHost, ++host_number_};
  note(access, host_);
  host_[kHost] = host_number_;  // whatever is asked for from now on comes after this
}

void CudaDouble::check(const Access& access, const Clock& clock) {
  for (const Access& before : accesses_) {
    if (before.stream == access.stream || before.begin >= access.end || access.begin >= before.end) continue;
    if (!before.writes && !access.writes) continue;
    const auto known = clock.find(before.stream);
    if (known != clock.end() && known->second >= before.number) continue;
    const auto verb = [](const Access& one) { return one.writes ? " writes" : " reads"; };
    return mistake(access.name + verb(access) + " what " + before.name + verb(before) +
                   ", and nothing says that it is done with it");
  }
}

// What comes after the new access and before an older one that it covers would be found by the new one alone, so only
// what is still needed is kept.
void CudaDouble::note(const Access& access, const Clock& clock) {
  check(access, clock);
  std::erase_if(accesses_, [&](const Access& before) {
    const bool covered = access.begin <= before.begin && before.end <= access.end;
    return covered && (access.writes || (!before.writes && before.stream == access.stream));
  });
  accesses_.push_back(access);
}

bool CudaDouble::step() {
  std::vector<StreamState*> ready;
  for (const auto& stream : streams_) {
    if (stream->queue.empty() || stream->held) continue;
    const Work& next = stream->queue.front();
    if (next.waits_for != nullptr && !next.waits_for->reached) continue;
    if (next.ready == nullptr || next.ready()) ready.push_back(stream.get());
  }
  if (ready.empty()) return false;
  StreamState& chosen = *ready[random_() % ready.size()];
  const Work work = std::move(chosen.queue.front());
  chosen.queue.pop_front();
  if (work.run) work.run();
  ++done_;
  if (work.reaches != nullptr) {
    work.reaches->at = done_;
    work.reaches->reached = true;
  }
  if (world_) world_->changed();
  return true;
}

void CudaDouble::some_steps() {
  for (uint64_t n = random_() % 3; n > 0 && step(); --n) {
  }
}

void CudaDouble::drain() {
  const std::lock_guard lock(mutex_);
  while (step()) {
  }
}

}  // namespace fusewire::testing
