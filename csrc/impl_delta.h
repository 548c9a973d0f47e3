// The gated delta rule, token by token. Part of kernels_impl.h.
//
// Columns of the matrix do not meet, so that threads and vectors share them; each column's sums are in
// the order of the rows, whatever the tokens of a call.

// Columns whose sums fit into registers: a matrix is read in as few and as long pieces as they allow.
#if defined(__AVX512F__)
constexpr int64_t kColumnsAtOnce = 4 * kDeltaColumns;
#else
constexpr int64_t kColumnsAtOnce = 2 * kDeltaColumns;
#endif

// V vectors of columns: o = S^T q after S = decay S was corrected towards v for k.
template <int64_t V>
void DeltaColumns(const DeltaArgs& args) {
  const F16 decay = F16{} + std::exp(args.g), beta = F16{} + args.beta;
  F16 seen[V] = {}, out[V] = {};
  for (int64_t row = 0; row < args.key_dim; ++row) {
    const F16 k = F16{} + args.k[row];
    const float* from = args.from + row * args.from_step;
    ROOFLAX_WHOLE
    for (int64_t i = 0; i < V; ++i) seen[i] += Load<F16>(from + i * kLanes) * decay * k;
  }
  ROOFLAX_WHOLE
  for (int64_t i = 0; i < V; ++i) seen[i] = beta * (Load<F16>(args.v + i * kLanes) - seen[i]);
  for (int64_t row = 0; row < args.key_dim; ++row) {
    const F16 k = F16{} + args.k[row], q = F16{} + args.q[row];
    const float* from = args.from + row * args.from_step;
    float* to = args.to + row * args.to_step;
    ROOFLAX_WHOLE
    for (int64_t i = 0; i < V; ++i) {
      const F16 corrected = Load<F16>(from + i * kLanes) * decay + k * seen[i];
      out[i] += corrected * q;
      Store(to + i * kLanes, corrected);
    }
  }
  ROOFLAX_WHOLE
  for (int64_t i = 0; i < V; ++i) Store(args.o + i * kLanes, out[i]);
}

void Delta(const DeltaArgs& args) {
  constexpr int64_t kFewest = kDeltaColumns / kLanes;
  if (args.columns == kDeltaColumns) return DeltaColumns<kFewest>(args);
  if (args.columns == 2 * kDeltaColumns) return DeltaColumns<2 * kFewest>(args);
  DeltaColumns<4 * kFewest>(args);
}
