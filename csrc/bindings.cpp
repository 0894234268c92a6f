// The Python module torch_flash_mps._C: loading it registers the ops. Beside them, only what describes
// the kernels; attention itself is called through torch.ops.

#include <ATen/Functions.h>
#include <torch/csrc/utils/pybind.h>

#include "attn_args.h"
#include "block_classes.h"
#include "device.h"
#include "flash_decode.h"
#include "flash_fwd.h"
#include "metal_language.h"
#include "metal_sources.h"
#include "ops.h"
#include "sdpa.h"
#include "tiling.h"

namespace flash_mps {

namespace py = pybind11;

namespace {

const char* path_name(OperandPath path) {
  return path == OperandPath::Staged ? "staged" : "direct";
}

const char* family_name(GpuFamily family) {
  switch (family) {
    case GpuFamily::Apple9: return "apple9";
    case GpuFamily::Apple10: return "apple10";
    case GpuFamily::Apple7: break;
  }
  return "apple7";
}

py::dict describe(const Tiling& tiling) {
  py::dict row;
  row["op"] = op_name(tiling.op);
  row["family"] = family_name(tiling.family);
  row["element_bytes"] = tiling.element_bytes;
  row["max_head_dim"] = tiling.max_head_dim;
  row["block_q"] = tiling.block_q;
  row["block_k"] = tiling.block_k;
  row["num_simdgroups"] = tiling.num_simdgroups;
  row["path"] = path_name(tiling.path);
  row["home"] = tiling.home == OperandHome::Registers ? "registers" : "device";
  return row;
}

py::dict not_run(const std::string& reason) {
  py::dict plan;
  plan["kernel"] = py::none();
  plan["reason"] = reason;
  return plan;
}

py::dict explain_decode(const AttnProblem& problem, GpuFamily family, bool return_lse) {
  if (const auto reason = flash_decode_unsupported(problem)) return not_run(*reason);
  const FlashDecodePlan decode =
      plan_flash_decode(problem, /*cached=*/nullptr, family, device()->gpu_cores(), return_lse);
  py::dict plan = describe(*decode.key.tiling);
  plan["kernel"] = decode.key.name();
  plan["reason"] = py::none();
  plan["classifies_mask"] = classifies_mask(problem, /*is_decode=*/true);
  plan["num_rows"] = decode.num_rows;
  plan["row_tiles"] = decode.row_tiles;
  plan["num_row_blocks"] = decode.num_row_blocks;
  plan["num_splits"] = decode.num_splits;
  return plan;
}

py::dict explain(FLASH_MPS_PARAMETERS, bool return_lse) {
  const char* op = return_lse ? "attention_with_lse" : "attention";
  std::optional<AttnProblem> problem;
  // In place of a state of dropout, which would be drawn from torch's generator.
  const at::Tensor state = rng_state.value_or(at::zeros({2}, at::kInt));
  try {
    problem = check_arguments(op, FLASH_MPS_ARGUMENTS_WITH(state, block_classes));
  } catch (const c10::Error& error) {
    return not_run(error.what_without_backtrace());
  }
  if (!query.device().is_mps()) {
    return not_run("inputs on " + query.device().str() + " run as plain PyTorch ops");
  }
  if (device() == nullptr) return not_run("no Metal device");
  const GpuFamily family = tuned_family(device()->gpu_family());
  if (runs_decode(*problem)) return explain_decode(*problem, family, return_lse);
  if (const auto reason = flash_fwd_unsupported(*problem, family)) return not_run(*reason);
  const FlashFwdPlan fwd = plan_flash_fwd(*problem, family, return_lse);
  py::dict plan = describe(*fwd.key.tiling);
  plan["kernel"] = fwd.key.name();
  plan["reason"] = py::none();
  plan["classifies_mask"] = classifies_mask(*problem, /*is_decode=*/false);
  plan["num_q_blocks"] = fwd.num_q_blocks;
  plan["num_head_blocks"] = fwd.head_blocks;
  plan["num_dispatches"] = fwd.num_dispatches();
  return plan;
}

py::dict params_layout() {
  py::dict layout;
  layout["sizeof"] = sizeof(AttnParams);
#define FLASH_MPS_OFFSET(field) layout[#field] = offsetof(AttnParams, field)
  FLASH_MPS_OFFSET(q_stride_b);
  FLASH_MPS_OFFSET(out_stride_s);
  FLASH_MPS_OFFSET(mask_stride_k);
  FLASH_MPS_OFFSET(num_heads_q);
  FLASH_MPS_OFFSET(head_dim_v);
  FLASH_MPS_OFFSET(band_end);
  FLASH_MPS_OFFSET(softmax_scale);
#undef FLASH_MPS_OFFSET
  return layout;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("explain", &explain);
  m.def("device_name", [] { return device() ? device()->name() : std::string(); });
  m.def("gpu_family", [] { return device() ? device()->gpu_family() : 0; });
  m.def("gpu_cores", [] { return device() ? device()->gpu_cores() : 0; });
  m.attr("metal_language") =
      std::to_string(kMetalLanguageMajor) + "." + std::to_string(kMetalLanguageMinor);
  m.def("refresh_device", [] {
    if (device() != nullptr) device()->refresh();
  });
  m.def("params_layout", &params_layout);
  m.def("enable_sdpa", &enable_sdpa);
  m.def("disable_sdpa", &disable_sdpa);
  m.def("metal_source", [](const std::string& name) { return metal_source(name); });
  m.def("num_splits",
        [](int64_t batch, int64_t num_heads_kv, int64_t seqlen_k, int apple_family, int gpu_cores) {
          return num_splits(batch, num_heads_kv, seqlen_k, tuned_family(apple_family), gpu_cores);
        });
  m.def("mask_pass_pays", [](double mask_bytes, double key_bytes, double products) {
    return mask_pass_pays({.mask_bytes = mask_bytes, .key_bytes = key_bytes, .products = products});
  });
  m.def("tilings", [] {
    py::list rows;
    for (const Tiling& tiling : tilings()) rows.append(describe(tiling));
    return rows;
  });
}

}  // namespace flash_mps
