#include "collective/adasum.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace fusewire {
namespace {

constexpr double kCancelled = 0x1p-46;

// 2^exponent times the sum of weights[r] * (input r, scaled).
struct Vector {
  std::vector<double> weights;
  int exponent;
};

struct Product {
  double value;
  double terms;  // the sum of what it is made of, without signs
  // Of a squared norm: see Note [Vectors that cancel].
  bool vanishes() const { return std::isfinite(terms) && value <= kCancelled * terms; }
};

class Tree {
 public:
  Tree(const std::vector<double>& gram, const std::vector<int>& exponents) : gram_(gram), n_(exponents.size()) {
    for (size_t r = 0; r < n_; ++r) {
      vectors_.push_back({std::vector<double>(n_, 0.0), exponents[r]});
      vectors_.back().weights[r] = 1.0;
    }
  }

  AdasumCombination run() {
    size_t whole = 1;
    while (whole * 2 <= n_) whole *= 2;
    for (size_t r = whole; r < n_; ++r) merge(vectors_[r - whole], vectors_[r]);
    for (size_t distance = 1; distance < whole; distance *= 2) {
      for (size_t i = 0; i < whole; i += 2 * distance) merge(vectors_[i], vectors_[i + distance]);
    }
    return {vectors_[0].weights, vectors_[0].exponent};
  }

 private:
  double entry(size_t i, size_t j) const {
    const auto [low, high] = std::minmax(i, j);
    return gram_[low * n_ - low * (low + 1) / 2 + high];
  }

  // Without the exponents.
  Product dot(const Vector& a, const Vector& b) const {
    Product product{0.0, 0.0};
    for (size_t i = 0; i < n_; ++i) {
      if (a.weights[i] == 0.0) continue;  // a NaN in an input that a has no part in is not its concern
      for (size_t j = 0; j < n_; ++j) {
        if (b.weights[j] == 0.0) continue;
        const double term = a.weights[i] * b.weights[j] * entry(i, j);
        product.value += term;
        product.terms += std::abs(term);
      }
    }
    return product;
  }

  void merge(Vector& a, const Vector& b) const {
    const Product aa = dot(a, a);
    const Product bb = dot(b, b);
    const double ab = dot(a, b).value;
    const int exponent = std::max(a.exponent, b.exponent);
    const double a_unit = std::ldexp(1.0, a.exponent - exponent);
    const double b_unit = std::ldexp(1.0, b.exponent - exponent);
    double a_weight = a_unit;
    double b_weight = b_unit;
    if (!aa.vanishes() && !bb.vanishes()) {
      a_weight -= b_unit * (ab / (2 * aa.value));
      b_weight -= a_unit * (ab / (2 * bb.value));
    }
    for (size_t r = 0; r < n_; ++r) a.weights[r] = a.weights[r] * a_weight + b.weights[r] * b_weight;
    a.exponent = exponent;
  }

  const std::vector<double>& gram_;
  size_t n_;
  std::vector<Vector> vectors_;
};

}  // namespace

AdasumCombination adasum_combination(const std::vector<double>& gram, const std::vector<int>& exponents) {
  return Tree(gram, exponents).run();
}

}  // namespace fusewire
