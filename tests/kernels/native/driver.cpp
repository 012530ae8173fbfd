// Runs kernels on numbers from a file, `driver INPUT OUTPUT`, also for processors that Python does
// not run on here. test_twins.py writes the records.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "attention.h"
#include "linear.h"

namespace {

FILE* input;
FILE* output;

template <class T>
std::vector<T> read(size_t count) {
  std::vector<T> values(count);
  if (count && std::fread(values.data(), sizeof(T), count, input) != count) std::abort();
  return values;
}

using Bytes = std::vector<char>;

void linear(rootlace::Team* team) {
  auto n = read<int32_t>(6);
  const int dtype = n[0], epilogue = n[1], rows = n[2], outputs = n[3], inputs = n[4];
  const size_t size = dtype == RL_FLOAT32 ? 4 : 2;
  Bytes x = read<char>(size * rows * inputs), weights = read<char>(size * outputs * inputs);
  auto bias = read<float>(outputs);
  Bytes out = read<char>(n[5]);
  const bool gated = epilogue == 3;
  const size_t packed = rl_packed_bytes(dtype, outputs, inputs, gated);
  void* memory = std::aligned_alloc(64, (packed + 63) / 64 * 64);
  rl_pack(team, dtype, weights.data(), outputs, inputs, gated, memory);
  RlLinear one{memory, bias.data(), inputs, outputs, nullptr, nullptr};
  rl_linear(team, dtype, epilogue, x.data(), inputs, rows, &one, 1, out.data());
  std::fwrite(out.data(), 1, out.size(), output);
  std::free(memory);
}

void codes(rootlace::Team* team) {
  auto n = read<int32_t>(10);
  const int dtype = n[0], rows = n[1], outputs = n[2], inputs = n[3];
  auto scheme = read<RlScheme>(1);
  Bytes values = read<char>(n[4]), scales = read<char>(n[5]), offsets = read<char>(n[6]);
  Bytes units = read<char>(n[7]), offset_units = read<char>(n[8]);
  Bytes x = read<char>((dtype == RL_FLOAT32 ? 4 : 2) * rows * inputs), out(n[9]);
  const auto address = [](const Bytes& all) { return all.empty() ? nullptr : all.data(); };
  const RlSource source{values.data(), scales.data(), address(offsets), address(units),
                        address(offset_units)};
  const size_t packed = rl_codes_bytes(dtype, outputs, inputs, 1, scheme.data());
  void* memory = std::aligned_alloc(64, (packed + 63) / 64 * 64);
  rl_pack_codes(team, dtype, outputs, inputs, 1, scheme.data(), 0, &source, memory);
  RlLinear one{memory, nullptr, inputs, outputs, scheme.data(), nullptr};
  rl_linear(team, dtype, 0, x.data(), inputs, rows, &one, 1, out.data());
  std::fwrite(out.data(), 1, out.size(), output);
  std::free(memory);
}

void attention(rootlace::Team* team) {
  auto n = read<int32_t>(9);
  const int dtype = n[0], heads = n[1], kv_heads = n[2], dim = n[3], block_size = n[4];
  const int rows = n[5], width = n[6], blocks = n[7], window = n[8];
  const size_t size = dtype == RL_FLOAT32 ? 4 : 2;
  auto row_start = read<int32_t>(rows + 1), context_len = read<int32_t>(rows);
  auto tables = read<int32_t>(rows * width);
  const size_t row = size * heads * dim, bytes = row * row_start.back();
  Bytes q = read<char>(bytes), out(bytes);
  const size_t cache = size * blocks * block_size * kv_heads * dim;
  Bytes keys = read<char>(cache), values = read<char>(cache);
  RlRows all{rows, width, row_start.data(), context_len.data(), tables.data(), 0, nullptr};
  rl_attention(team, dtype, heads, kv_heads, dim, block_size, 0, &all, q.data(), heads * dim,
               keys.data(), values.data(), 1, 0, window, 0.125f, 0, out.data(), nullptr);
  std::fwrite(out.data(), 1, out.size(), output);
}

}  // namespace

int main(int, char** names) {
  input = std::fopen(names[1], "rb");
  output = std::fopen(names[2], "wb");
  if (!input || !output) return 1;
  std::puts(rl_instructions());
  auto* team = static_cast<rootlace::Team*>(rl_team_new(2));
  void (*const all[])(rootlace::Team*) = {linear, attention, codes};
  for (int32_t kind; std::fread(&kind, 4, 1, input) == 1;) all[kind](team);
  rl_team_free(team);
  return std::fclose(output);
}
