// The rules, once for every kind of vector. Included by one file per instruction set, inside of its target region: so there is
// no include here, and everything has internal linkage (see [Note: one file per instruction set] in kernels.hpp).
#pragma once

namespace tieroff {
namespace {

constexpr bool is_double(Arithmetic a) {
  return a == Arithmetic::kDoubleApart || a == Arithmetic::kDoubleFirst || a == Arithmetic::kDoubleSecond;
}
constexpr bool is_per_op(Arithmetic a) {
  return a == Arithmetic::kDeviceOps || a == Arithmetic::kDeviceOpsReciprocal || a == Arithmetic::kContractedOps;
}
constexpr bool is_of_device(Arithmetic a) {
  return a == Arithmetic::kDeviceOps || a == Arithmetic::kDeviceOpsReciprocal;
}

// What is the same for all elements of a part, in vectors.
template <class V>
struct Shared {
  using F = typename V::F;
  using D = typename V::D;
  const UpdatePart& part;
  F decay, step, first, first_rest, second, second_rest, root, inverse_root, epsilon, float_step, float_root;
  D wide_decay, wide_rate_decay, wide_step, wide_first, wide_first_rest, wide_second, wide_second_rest, wide_epsilon;

  explicit Shared(const UpdatePart& of)
      : part(of),
        decay(single(of.scalars.decay)),
        step(single(of.scalars.step)),
        first(single(of.scalars.first)),
        first_rest(single(of.scalars.first_rest)),
        second(single(of.scalars.second)),
        second_rest(single(of.scalars.second_rest)),
        root(single(of.scalars.root_correction)),
        inverse_root(V::set(1.0F / of_a_scalar(of.scalars.root_correction))),
        epsilon(single(of.scalars.epsilon)),
        float_step(single(of.scalars.float_step)),
        float_root(single(of.scalars.float_root_correction)),
        wide_decay(V::set(of.scalars.decay)),
        wide_rate_decay(V::set(-of.scalars.rate_decay)),
        wide_step(V::set(of.scalars.step)),
        wide_first(V::set(of.scalars.first)),
        wide_first_rest(V::set(of.scalars.first_rest)),
        wide_second(V::set(of.scalars.second)),
        wide_second_rest(V::set(of.scalars.second_rest)),
        wide_epsilon(V::set(of.scalars.epsilon)) {}

  static F single(double x) { return V::set(of_a_scalar(x)); }
};

// One op's result in the type of the tensor, where the arithmetic rounds after each.
template <class V, class S, Arithmetic A>
typename V::F op(typename V::F x) {
  if constexpr (is_per_op(A) && sizeof(S) == sizeof(Bfloat16)) return V::rounded(x);
  return x;
}

// x + a y as an op of its own.
template <class V, class S, Arithmetic A>
typename V::F plus(typename V::F x, typename V::F a, typename V::F y) {
  if constexpr (A == Arithmetic::kPlain) return op<V, S, A>(V::add(x, V::mul(a, y)));
  return op<V, S, A>(V::fma(a, y, x));
}

// a b + c d in fp64.
template <class V, Arithmetic A>
typename V::D sum(typename V::D a, typename V::D b, typename V::D c, typename V::D d) {
  if constexpr (A == Arithmetic::kDoubleFirst) return V::fma(a, b, V::mul(c, d));
  if constexpr (A == Arithmetic::kDoubleSecond) return V::fma(c, d, V::mul(a, b));
  return V::add(V::mul(a, b), V::mul(c, d));
}

// x + a y in fp64.
template <class V, Arithmetic A>
typename V::F wide_plus(typename V::F x, typename V::D a, typename V::F y) {
  if constexpr (A == Arithmetic::kDoubleApart) return V::narrow(V::add(V::wide(x), V::mul(a, V::wide(y))));
  return V::narrow(V::fma(a, V::wide(y), V::wide(x)));
}

// The gradient as the rule takes it: scaled, with its sign, with the decay that is added to it.
template <class V, class S, Arithmetic A>
typename V::F gradient(const Shared<V>& s, typename V::F p, typename V::F g, bool turns_sign) {
  for (const float factor : s.part.factors) {
    g = V::mul(g, V::set(of_a_scalar(factor)));
    if constexpr (sizeof(S) == sizeof(Bfloat16)) g = V::rounded(g);
  }
  if (turns_sign) g = V::negated(g);
  if (s.part.decay != Decay::kGradient) return g;
  if constexpr (is_double(A)) return wide_plus<V, A>(g, s.wide_decay, p);
  return plus<V, S, A>(g, s.decay, p);
}

// The parameter less its decay.
template <class V, class S, Arithmetic A>
typename V::F decayed(const Shared<V>& s, typename V::F p) {
  if (s.part.decay != Decay::kParameter) return p;
  if constexpr (is_double(A)) return wide_plus<V, A>(p, s.wide_rate_decay, p);
  return op<V, S, A>(V::mul(p, s.decay));
}

// PyTorch's lerp: below one half from the start, else from the end.
template <class V, class S, Arithmetic A>
typename V::F lerp(const Shared<V>& s, typename V::F start, typename V::F end) {
  const auto weight = static_cast<float>(s.part.scalars.first_rest);
  const typename V::F distance = V::sub(end, start);
  const bool is_near = weight < 0.5F && weight > -0.5F;
  const typename V::F base = is_near ? start : end;
  const typename V::F share = V::set(is_near ? weight : weight - 1.0F);
  if constexpr (A == Arithmetic::kPlain) return op<V, S, A>(V::add(base, V::mul(share, distance)));
  return op<V, S, A>(V::fma(share, distance, base));
}

// Adam and AdamW, with the moments in fp32; x holds parameter, gradient, moments and the largest second one.
template <class V, class S, Arithmetic A, bool HAS_MAXIMUM>
void adam(const Shared<V>& s, typename V::F* x) {
  using F = typename V::F;
  const F g = gradient<V, S, A>(s, x[0], x[1], s.part.is_maximized);
  const F p = decayed<V, S, A>(s, x[0]);
  const F m = lerp<V, S, A>(s, x[2], g);
  F v = op<V, S, A>(V::mul(x[3], s.second));
  const F left = is_of_device(A) ? s.second_rest : V::mul(s.second_rest, g);
  const F right = is_of_device(A) ? V::mul(g, g) : g;
  v = op<V, S, A>(A == Arithmetic::kPlain ? V::add(v, V::mul(left, right)) : V::fma(left, right, v));
  if constexpr (HAS_MAXIMUM) x[4] = V::maximum(x[4], v);
  F d = op<V, S, A>(V::root(HAS_MAXIMUM ? x[4] : v));
  d = op<V, S, A>(A == Arithmetic::kDeviceOpsReciprocal ? V::mul(d, s.inverse_root) : V::div(d, s.root));
  d = op<V, S, A>(V::add(d, s.epsilon));
  x[0] = op<V, S, A>(is_of_device(A) ? V::fma(s.step, V::div(m, d), p) : V::add(p, V::div(V::mul(s.step, m), d)));
  x[2] = m;
  x[3] = v;
}

// Adam and AdamW with the moments in fp64.
template <class V, class S, Arithmetic A, bool HAS_MAXIMUM>
void wide_adam(const Shared<V>& s, typename V::F* x) {
  using F = typename V::F;
  const F g = gradient<V, S, A>(s, x[0], x[1], s.part.is_maximized);
  const F p = decayed<V, S, A>(s, x[0]);
  const F m = V::narrow(sum<V, A>(s.wide_first, V::wide(x[2]), s.wide_first_rest, V::wide(g)));
  const F v = V::narrow(sum<V, A>(s.wide_second, V::wide(x[3]), V::mul(s.wide_second_rest, V::wide(g)), V::wide(g)));
  if constexpr (HAS_MAXIMUM) x[4] = V::larger(x[4], v);
  const F root = V::div(V::root(HAS_MAXIMUM ? x[4] : v), s.float_root);
  const F d = V::narrow(V::add(V::wide(root), s.wide_epsilon));
  x[0] = V::sub(p, V::div(V::mul(s.float_step, m), d));
  x[2] = m;
  x[3] = v;
}

template <class V, class S, Arithmetic A, bool HAS_MOMENTUM>
void sgd(const Shared<V>& s, typename V::F* x) {
  using F = typename V::F;
  // In fp64 the sign is turned where the parameter is written: the momentum is that of the gradient as it came.
  F g = gradient<V, S, A>(s, x[0], x[1], s.part.is_maximized && !is_double(A));
  if constexpr (HAS_MOMENTUM) {
    F b = g;
    if (!s.part.is_first) {
      if constexpr (is_double(A))
        b = V::narrow(sum<V, A>(s.wide_first, V::wide(x[2]), s.wide_first_rest, V::wide(g)));
      else
        b = plus<V, S, A>(op<V, S, A>(V::mul(x[2], s.first)), s.first_rest, g);
    }
    x[2] = b;
    if (s.part.is_nesterov) {
      if constexpr (is_double(A))
        g = wide_plus<V, A>(g, s.wide_first, b);
      else
        g = plus<V, S, A>(g, s.first, b);
    } else {
      g = b;
    }
  }
  if constexpr (is_double(A))
    x[0] = wide_plus<V, A>(x[0], s.part.is_maximized ? V::set(-s.part.scalars.step) : s.wide_step, g);
  else
    x[0] = plus<V, S, A>(x[0], s.step, g);
}

template <class V, class S, Arithmetic A>
void adagrad(const Shared<V>& s, typename V::F* x) {
  using F = typename V::F;
  const F g = gradient<V, S, A>(s, x[0], x[1], s.part.is_maximized);
  const F squares = op<V, S, A>(A == Arithmetic::kPlain ? V::add(x[2], V::mul(g, g)) : V::fma(g, g, x[2]));
  const F d = op<V, S, A>(V::add(op<V, S, A>(V::root(squares)), s.epsilon));
  const F p = x[0];
  x[0] = op<V, S, A>(is_of_device(A) ? V::fma(s.step, V::div(g, d), p) : V::add(p, V::div(V::mul(s.step, g), d)));
  x[2] = squares;
}

template <class V, class S, Arithmetic A>
void lion(const Shared<V>& s, typename V::F* x) {
  using F = typename V::F;
  const F g = gradient<V, S, A>(s, x[0], x[1], s.part.is_maximized);
  const F p = decayed<V, S, A>(s, x[0]);
  const F direction = V::sign(plus<V, S, A>(op<V, S, A>(V::mul(x[2], s.first)), s.first_rest, g));
  x[0] = plus<V, S, A>(p, s.step, direction);
  x[2] = plus<V, S, A>(op<V, S, A>(V::mul(x[2], s.second)), s.second_rest, g);
}

template <class V, class S, Arithmetic A>
void store(S* at, typename V::F x) {
  if constexpr (is_per_op(A) && sizeof(S) == sizeof(Bfloat16))
    V::store_rounded(at, x);
  else
    V::store(at, x);
}

// Runs a rule over elements: whole vectors where they lie, the rest by way of one vector in memory.
template <class V, class S, Arithmetic A, std::size_t TENSORS, class Rule>
void run(const UpdatePart& part, std::int64_t first, std::int64_t count, Rule rule) {
  const Shared<V> shared(part);
  const auto width = static_cast<std::int64_t>(V::kWidth);
  std::array<const S*, TENSORS> from{};
  std::array<S*, TENSORS> to{};
  for (std::size_t i = 0; i < TENSORS; ++i) {
    from[i] = static_cast<const S*>(part.inputs[i]) + first;
    to[i] = static_cast<S*>(part.outputs[i]) + first;
  }
  typename V::F x[TENSORS];  // no std::array: a vector type loses its attributes as the argument of a template
  std::int64_t at = 0;
  for (; at + width <= count; at += width) {
    for (std::size_t i = 0; i < TENSORS; ++i) x[i] = V::load(from[i] + at);
    rule(shared, x);
    for (std::size_t i = 0; i < TENSORS; ++i)
      if (i != 1) store<V, S, A>(to[i] + at, x[i]);
  }
  if constexpr (V::kWidth > 1) {  // of single elements nothing is left
    if (at == count) return;
    const auto left = std::min(static_cast<std::size_t>(count - at), V::kWidth);
    std::array<std::array<S, V::kWidth>, TENSORS> rest{};
    for (std::size_t i = 0; i < TENSORS; ++i) {
      std::copy_n(from[i] + at, left, rest[i].data());
      x[i] = V::load(rest[i].data());
    }
    rule(shared, x);
    for (std::size_t i = 0; i < TENSORS; ++i) {
      if (i == 1) continue;
      store<V, S, A>(rest[i].data(), x[i]);
      std::copy_n(rest[i].data(), left, to[i] + at);
    }
  }
}

template <class V, class S, Arithmetic A>
void by_rule(const UpdatePart& part, std::int64_t first, std::int64_t count) {
  using Of = const Shared<V>&;
  using X = typename V::F*;
  switch (part.rule) {
    case UpdateRule::kAdam:
      if constexpr (is_double(A)) {
        if (part.has_maximum)
          run<V, S, A, 5>(part, first, count, [](Of s, X x) { wide_adam<V, S, A, true>(s, x); });
        else
          run<V, S, A, 4>(part, first, count, [](Of s, X x) { wide_adam<V, S, A, false>(s, x); });
      } else {
        if (part.has_maximum)
          run<V, S, A, 5>(part, first, count, [](Of s, X x) { adam<V, S, A, true>(s, x); });
        else
          run<V, S, A, 4>(part, first, count, [](Of s, X x) { adam<V, S, A, false>(s, x); });
      }
      return;
    case UpdateRule::kSgd:
      if (part.has_momentum)
        run<V, S, A, 3>(part, first, count, [](Of s, X x) { sgd<V, S, A, true>(s, x); });
      else
        run<V, S, A, 2>(part, first, count, [](Of s, X x) { sgd<V, S, A, false>(s, x); });
      return;
    case UpdateRule::kAdagrad:
      if constexpr (!is_double(A)) run<V, S, A, 3>(part, first, count, [](Of s, X x) { adagrad<V, S, A>(s, x); });
      return;
    case UpdateRule::kLion:
      if constexpr (!is_double(A)) run<V, S, A, 3>(part, first, count, [](Of s, X x) { lion<V, S, A>(s, x); });
      return;
  }
}

template <class V, class S>
void by_arithmetic(const UpdatePart& part, std::int64_t first, std::int64_t count) {
  switch (part.arithmetic) {
    case Arithmetic::kPlain:
      return by_rule<V, S, Arithmetic::kPlain>(part, first, count);
    case Arithmetic::kContracted:
      return by_rule<V, S, Arithmetic::kContracted>(part, first, count);
    case Arithmetic::kDeviceOps:
      return by_rule<V, S, Arithmetic::kDeviceOps>(part, first, count);
    case Arithmetic::kDeviceOpsReciprocal:
      return by_rule<V, S, Arithmetic::kDeviceOpsReciprocal>(part, first, count);
    case Arithmetic::kContractedOps:
      return by_rule<V, S, Arithmetic::kContractedOps>(part, first, count);
    case Arithmetic::kDoubleApart:
      return by_rule<V, S, Arithmetic::kDoubleApart>(part, first, count);
    case Arithmetic::kDoubleFirst:
      return by_rule<V, S, Arithmetic::kDoubleFirst>(part, first, count);
    case Arithmetic::kDoubleSecond:
      return by_rule<V, S, Arithmetic::kDoubleSecond>(part, first, count);
  }
}

template <class V>
void update_with(const UpdatePart& part, std::int64_t first, std::int64_t count) {
  if (part.type == UpdateType::kFloat32)
    by_arithmetic<V, float>(part, first, count);
  else
    by_arithmetic<V, Bfloat16>(part, first, count);
}

}  // namespace
}  // namespace tieroff
