// Adasum (arXiv 2006.02924): a sum of gradients that counts what they have in common once. Of two vectors it is
//
//   adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b
//
// so that orthogonal vectors are added and equal ones averaged; with a zero vector it is the plain sum.
#pragma once

#include <vector>

namespace fusewire {

// Note [Adasum tree]
// More than two vectors are combined along one tree, the same on every plane (and in the reference of the tests), since
// the rule is not associative. Let n be their number and p the largest power of two <= n:
//
//   extras first    for r in [p, n):                                v[r - p] = adasum(v[r - p], v[r])
//   then by pairs   for d = 1, 2, 4, ... p / 2, for i = 0, 2d, 4d, ... p - 2d:  v[i] = adasum(v[i], v[i + d])
//
// and v[0] is the result. Every vector in the tree is a linear combination of the n inputs, and its norms and dot
// products follow from those of the inputs, their Gram matrix. So one pass over the data computes the matrix, every
// rank goes through the tree with n numbers per vector, and a second pass forms the result, which is rounded once.
//
// Note [Vectors that cancel]
// A vector of the tree may cancel to (nearly) nothing, as opposite inputs do. Its norm then is a difference of large
// terms, and what is left of it rounding errors. A squared norm below 2^-46 of its terms (so a vector below about one
// unit in fp32's last place of what it is made of) counts as zero: both coefficients are 1. A vector with an infinity
// or a NaN never does: with another that is not zero it gives what the formula gives, NaN in every element.
struct AdasumCombination {
  std::vector<double> coefficients;  // of the inputs times their scales (below)
  int exponent = 0;                  // the result is 2^exponent times their combination
};

// `gram` holds the dot products of the n inputs, (0, 0), (0, 1), ... (0, n - 1), (1, 1), ..., input r scaled by
// 2^-exponents[r] so that its square neither vanishes nor overflows.
AdasumCombination adasum_combination(const std::vector<double>& gram, const std::vector<int>& exponents);

}  // namespace fusewire
