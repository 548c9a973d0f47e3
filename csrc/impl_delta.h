// The gated delta rule, token by token. Part of kernels_impl.h.
//
// Columns of the matrix do not meet, so that threads and vectors share them; each column's sums are in
// the order of the rows, whatever the tokens of a call.

// Two vectors of columns: o = S^T q after S = decay S was corrected towards v for k.
void Delta(const DeltaArgs& args) {
  const F16 decay = F16{} + std::exp(args.g), beta = F16{} + args.beta;
  F16 seen[2] = {}, out[2] = {};
  for (int64_t row = 0; row < args.key_dim; ++row) {
    const F16 k = F16{} + args.k[row];
    const float* from = args.from + row * args.from_step;
    float* s = args.decayed + row * kDeltaColumns;
    ROOFLAX_WHOLE
    for (int64_t i = 0; i < 2; ++i) {
      const F16 kept = Load<F16>(from + i * kLanes) * decay;
      seen[i] += kept * k;
      Store(s + i * kLanes, kept);
    }
  }
  ROOFLAX_WHOLE
  for (int64_t i = 0; i < 2; ++i) seen[i] = beta * (Load<F16>(args.v + i * kLanes) - seen[i]);
  for (int64_t row = 0; row < args.key_dim; ++row) {
    const F16 k = F16{} + args.k[row], q = F16{} + args.q[row];
    const float* s = args.decayed + row * kDeltaColumns;
    float* to = args.to + row * args.to_step;
    ROOFLAX_WHOLE
    for (int64_t i = 0; i < 2; ++i) {
      const F16 corrected = Load<F16>(s + i * kLanes) + k * seen[i];
      out[i] += corrected * q;
      Store(to + i * kLanes, corrected);
    }
  }
  ROOFLAX_WHOLE
  for (int64_t i = 0; i < 2; ++i) Store(args.o + i * kLanes, out[i]);
}
