// Python module _simulator: controls of the simulated GPU, Metal for tests, torch's `mps` device.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "mps_device/mps_device.h"
#include "python_metal.h"
#include "runtime/compiler.h"
#include "runtime/device_state.h"

namespace py = pybind11;

namespace sim {
namespace {

py::dict counters_dict(const Counters& c) {
  py::dict d;
  d["kernel"] = c.kernel;
  d["threadgroups"] = c.threadgroups;
  d["matrix_products"] = c.matrix_products;
  d["exponentials"] = c.exponentials;
  d["threadgroup_barriers"] = c.threadgroup_barriers;
  d["simdgroup_barriers"] = c.simdgroup_barriers;
  d["shuffles"] = c.shuffles;
  d["device_bytes_read"] = c.device_bytes_read;
  d["device_bytes_written"] = c.device_bytes_written;
  d["device_bytes_read_distinct"] = c.device_bytes_read_distinct;
  d["device_bytes_footprint"] = c.device_bytes_footprint;
  d["constant_bytes_read"] = c.constant_bytes_read;
  d["threadgroup_bytes_read"] = c.threadgroup_bytes_read;
  d["threadgroup_bytes_written"] = c.threadgroup_bytes_written;
  return d;
}

py::list counters_list() {
  py::list list;
  for (const auto& one : counters()) list.append(counters_dict(one));
  return list;
}

py::dict stats_dict() {
  const Stats s = stats();
  py::dict d;
  d["pipelines_built"] = s.pipelines_built;
  d["command_buffers"] = s.command_buffers;
  d["commits"] = s.commits;
  d["dispatches"] = s.dispatches;
  d["bytes_allocated"] = s.bytes_allocated;
  return d;
}

// The folder that holds msl/ and runtime/kernel_abi.h, which kernels are compiled with.
void set_header_directory(const std::string& directory) {
  set_msl_include_directory(directory + "/msl");
}

}  // namespace
}  // namespace sim

PYBIND11_MODULE(_simulator, module) {
  using namespace sim;
  module.def("checks_enabled", &checks_enabled);
  module.def("set_checks", &set_checks, py::arg("enabled"));
  module.def("shuffle_seed", &shuffle_seed);
  module.def("set_shuffle_seed", &set_shuffle_seed, py::arg("seed").none(true));
  module.def("gpu_family", [] { return "apple" + std::to_string(gpu_family()); });
  module.def("set_gpu_family", &set_gpu_family, py::arg("name"));
  module.def("set_gpu_cores", &set_gpu_cores, py::arg("count").none(true));
  module.def("set_header_directory", &set_header_directory, py::arg("directory"));
  module.def("counters", &counters_list);
  module.def("reset_counters", &reset_counters);
  module.def("stats", &stats_dict);
  module.def("take_fault", &take_fault, "The first fault that nobody has raised yet, or None.");
  bind_metal(module);
  bind_mps_device(module);
}
