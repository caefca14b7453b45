// Note [Adasum by halving]
// The tree is adasum.h's: extras first, then pairs at distance 1, 2, 4, ... (arXiv 2006.02924, algorithm 1). At
// distance d, groups of d members each hold a vector of the tree between them, cut into d fragments. A member and its
// partner in the neighbouring group have the same fragment of two vectors; each gives the other one half of it and
// keeps the other half, so that the 2d members of both groups now hold equal fragments of both vectors. Their dot
// products are sums over the group's: everybody sends its own, three numbers per tensor, to the others, and all add
// them in the order of ranks, hence to the same bits. Then each combines what it holds. At the end every member has one
// fragment of the result, and gives it to all, the extras included. That is as many bytes on the wire as an allreduce
// takes.
//
// Tensors keep their places in the fused row, and fragments are cut in the row, so that a tensor may lie in any number
// of them; what a fragment has of it is a span of its own (SpanPlan).
//
// Vectors of the tree are kept in fp32 at least. Half types are widened once, when they have been packed, and rounded
// once, at the end: three or four roundings to bf16 would show. Dot products are in fp64, so nothing but fp64 itself
// leaves their range: an fp64 vector below 1e-154 in size counts as zero, one above 1e154 as infinite. (The planes for
// CPU tensors have a way around that, which takes a look at the numbers on the host: Note [Scales of fp64].) Scales are
// applied in the last combination, because adasum(s a, s b) is s adasum(a, b).
#include "collective/nccl/nccl_adasum.h"

#include <algorithm>
#include <vector>

#include "collective/bucket_cursor.h"
#include "kernels/device_plan.h"

namespace fusewire {
namespace {

constexpr int64_t kStep = 8;  // elements: fragments of any type begin at multiples of 16 bytes
constexpr size_t kPairs = 3;  // a.a, a.b, b.b

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t count() const { return end - begin; }
};

Range half(const Range& range, bool upper) {
  const int64_t share = ((range.count() + 1) / 2 + kStep - 1) / kStep * kStep;
  const int64_t middle = std::min(range.end, range.begin + share);
  return upper ? Range{middle, range.end} : Range{range.begin, middle};
}

// A rank gives `give` of its vector to a peer, and combines `keep` with the peer's.
struct Step {
  int peer;
  Range keep;
  Range give;
  bool combines;  // an extra only gives; a member whose part is empty does as the others do
  bool first;     // its own vector is the first of the two
  int group;      // first member of the group that holds the two vectors, and how many they are
  int members;
};

int largest_power(int size) {
  int power = 1;
  while (power * 2 <= size) power *= 2;
  return power;
}

std::vector<Step> steps_of(int rank, int size, int64_t elements) {
  const int whole = largest_power(size);
  Range range{0, elements};
  std::vector<Step> steps;
  if (rank >= whole) return {{rank - whole, {}, range, false, false, rank, 1}};
  if (rank + whole < size) steps.push_back({rank + whole, range, {}, true, true, rank, 1});
  for (int distance = 1; distance < whole; distance *= 2) {
    const bool upper = (rank & distance) != 0;
    steps.push_back({rank ^ distance, half(range, upper), half(range, !upper), true, !upper, rank & ~(2 * distance - 1),
                     2 * distance});
    range = steps.back().keep;
  }
  return steps;
}

// What `rank` holds of the result.
Range fragment_of(int rank, int size, int64_t elements) {
  if (rank >= largest_power(size)) return {};
  Range range{0, elements};
  for (int distance = 1; distance < largest_power(size); distance *= 2) range = half(range, (rank & distance) != 0);
  return range;
}

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

bool is_half(DataType type) { return type == DataType::kFloat16 || type == DataType::kBFloat16; }

// One row of tensors, from pack to unpack.
class RowAdasum {
 public:
  RowAdasum(NcclContext& context, const Bucket& bucket, const GpuRow& row)
      : context_(context),
        device_(context.device()),
        bucket_(bucket),
        row_(row),
        type_(is_half(bucket.wire) ? DataType::kFloat32 : bucket.wire),
        width_(size_of(type_)),
        elements_(static_cast<int64_t>(row.bytes() / row.width)),
        steps_(steps_of(context.rank(), context.size(), elements_)) {}

  void run() {
    pack();
    prepare();
    for (size_t i = 0; i < steps_.size(); ++i) {
      exchange(steps_[i]);
      if (steps_[i].combines) combine(steps_[i], plans_[i], tables_[i].get(), i + 1 == steps_.size());
    }
    gather();
    gpu_unpack(device_, row_.out, bucket_.dtype, bucket_.wire, packed_.get(), {});
  }

 private:
  static std::byte* at(const GpuLoan& loan, size_t offset) { return static_cast<std::byte*>(loan.get()) + offset; }
  bool widens() const { return type_ != bucket_.wire; }
  size_t bytes(int64_t elements) const { return static_cast<size_t>(elements) * width_; }
  // This rank's vector of the tree, from an element on.
  std::byte* vector_at(int64_t element) const { return at(widens() ? vector_ : packed_, bytes(element)); }

  // An absent member's vector is zero, which is what gpu_pack() writes.
  void pack() {
    packed_ = GpuLoan(device_, GpuMemory::kDevice, row_.bytes());
    const bool narrows = bucket_.wire != bucket_.dtype;
    gpu_pack(device_, row_.in, bucket_.dtype, bucket_.wire, packed_.get(),
             {.factor = narrows ? bucket_.prescale : 1.0});
    factor_ = narrows ? bucket_.postscale : bucket_.prescale * bucket_.postscale;
    if (!widens()) return;
    vector_ = GpuLoan(device_, GpuMemory::kDevice, bytes(elements_));
    const TensorView all = contiguous_view(vector_.get(), type_, {elements_});
    gpu_unpack(device_, {{&all, 0, elements_, 0}}, type_, bucket_.wire, packed_.get(), {});
  }

  // What the steps need, before the first of them: nothing of it waits for a peer.
  void prepare() {
    size_t longest = 0;
    size_t slots = 0;
    size_t members = 1;
    for (const Step& step : steps_) {
      if (!step.combines) return;
      SpanPlan& plan = plans_.emplace_back(type_);
      for (const GpuPiece& piece : row_.in) {
        const auto begin = static_cast<int64_t>(piece.offset / row_.width);
        const int64_t first = std::clamp(begin, step.keep.begin, step.keep.end);
        const int64_t last = std::clamp(begin + piece.count, step.keep.begin, step.keep.end);
        plan.add(static_cast<uint64_t>(first - step.keep.begin), static_cast<uint64_t>(last - first));
      }
      tables_.push_back(gpu_upload(device_, plan.table_bytes(), [&](void* table) { plan.write(table); }));
      longest = std::max(longest, bytes(step.keep.count()));
      slots = std::max<size_t>(slots, plan.slots());
      members = std::max(members, static_cast<size_t>(step.members));
    }
    received_ = GpuLoan(device_, GpuMemory::kDevice, longest);
    dots_bytes_ = aligned(spans() * kPairs * sizeof(double));
    const size_t arrivals_bytes = aligned(spans() * sizeof(uint32_t));
    const size_t partials_bytes = slots * kPairs * sizeof(double);
    scratch_ = GpuLoan(device_, GpuMemory::kDevice, arrivals_bytes + (members + 1) * dots_bytes_ + partials_bytes);
    arrivals_ = reinterpret_cast<uint32_t*>(at(scratch_, 0));
    total_ = reinterpret_cast<double*>(at(scratch_, arrivals_bytes));
    dots_ = at(scratch_, arrivals_bytes + dots_bytes_);
    partials_ = reinterpret_cast<double*>(dots_ + members * dots_bytes_);
    device_.api().fill(arrivals_, 0, spans() * sizeof(uint32_t), device_.stream());
  }

  size_t spans() const { return row_.in.size(); }
  double* dots_of(int member) const {
    return reinterpret_cast<double*>(dots_ + static_cast<size_t>(member) * dots_bytes_);
  }

  void exchange(const Step& step) {
    context_.link.exchange({{vector_at(step.give.begin), bytes(step.give.count()), step.peer}},
                           {{at(received_, 0), bytes(step.keep.count()), step.peer}});
  }

  void combine(const Step& step, const SpanPlan& plan, const void* table, bool last) {
    std::byte* const own = vector_at(step.keep.begin);
    const void* const sources[] = {step.first ? own : received_.get(), step.first ? received_.get() : own};
    DeviceDotArgs dot = plan.dot_args(table);
    DeviceCombineArgs combination = plan.combine_args(table);
    for (int s = 0; s < 2; ++s) dot.sources[s] = combination.sources[s] = sources[s];
    dot.source_count = combination.source_count = 2;
    dot.dots = dots_of(context_.rank() - step.group);
    dot.partials = partials_;
    dot.arrivals = arrivals_;
    combination.dots = step.members == 1 ? dot.dots : total_;
    combination.destination = own;
    combination.factor = last ? factor_ : 1.0;
    dot.stream = combination.stream = device_.stream();

    // Spans without elements here keep what is there, and add nothing to the others'.
    device_.api().fill(dot.dots, 0, spans() * kPairs * sizeof(double), device_.stream());
    device_.api().dot(dot);
    if (step.members > 1) add_up(step);
    device_.api().combine(combination);
  }

  // The dot products of all members of the group, in the order of their ranks.
  void add_up(const Step& step) {
    std::vector<NcclPart> from;
    std::vector<NcclPart> to;
    std::vector<const void*> all;
    const int self = context_.rank() - step.group;
    for (int member = 0; member < step.members; ++member) {
      const auto part = [&](int whose) {
        return NcclPart{reinterpret_cast<std::byte*>(dots_of(whose)), spans() * kPairs * sizeof(double),
                        step.group + member};
      };
      from.push_back(part(self));
      to.push_back(part(member));
      all.push_back(dots_of(member));
    }
    context_.link.exchange(from, to);
    gpu_reduce(device_, all, total_, spans() * kPairs, DataType::kFloat64, {});
  }

  // Everybody's fragment to all, in the type that travels.
  void gather() {
    const Range own = fragment_of(context_.rank(), context_.size(), elements_);
    const auto place = [&](const Range& range) { return at(packed_, static_cast<size_t>(range.begin) * row_.width); };
    if (widens() && own.count() > 0) {
      const TensorView mine = contiguous_view(vector_at(own.begin), type_, {own.count()});
      gpu_pack(device_, {{&mine, 0, own.count(), 0}}, type_, bucket_.wire, place(own), {});
    }
    std::vector<NcclPart> parts;
    for (int rank = 0; rank < context_.size(); ++rank) {
      const Range range = fragment_of(rank, context_.size(), elements_);
      parts.push_back({place(range), static_cast<size_t>(range.count()) * row_.width, rank});
    }
    context_.link.gather_parts(place(own), parts);
  }

  NcclContext& context_;
  GpuDevice& device_;
  const Bucket& bucket_;
  const GpuRow& row_;
  const DataType type_;  // of the vectors
  const size_t width_;
  const int64_t elements_;
  const std::vector<Step> steps_;
  double factor_ = 1.0;
  GpuLoan packed_;  // the row, in the type that travels
  GpuLoan vector_;  // the row, widened
  GpuLoan received_;
  GpuLoan scratch_;
  std::vector<SpanPlan> plans_;  // of each step
  std::vector<GpuLoan> tables_;
  uint32_t* arrivals_ = nullptr;
  double* total_ = nullptr;
  double* partials_ = nullptr;
  std::byte* dots_ = nullptr;  // of each member of a group
  size_t dots_bytes_ = 0;
};

// Whole tensors: coefficients belong to those.
std::vector<GpuRow> rows_of(const Bucket& bucket, size_t most) {
  std::vector<GpuRow> rows;
  int64_t elements = 0;
  for (const Segment& segment : bucket.segments) {
    const int64_t count = segment.input.numel();
    if (count != segment.output.numel()) contradiction("input and output of a tensor differ in size");
    elements += count;
    const size_t width = size_of(bucket.wire);
    if (rows.empty() || rows.back().bytes() + static_cast<size_t>(count) * width > most) rows.emplace_back(width, 0);
    rows.back().append(&segment.input, 0, &segment.output, 0, count);
  }
  if (elements != bucket.elements) contradiction("its element count is not the sum of its tensors'");
  std::erase_if(rows, [](const GpuRow& row) { return row.bytes() == 0; });
  return rows;
}

}  // namespace

void nccl_adasum(NcclContext& context, const Bucket& bucket) {
  for (const GpuRow& row : rows_of(bucket, context.tuning.buffer_bytes)) RowAdasum(context, bucket, row).run();
}

}  // namespace fusewire
