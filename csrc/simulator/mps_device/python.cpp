// The functions behind torch.mps that a torch without MPS lacks.
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include "allocator.h"
#include "buffers.h"
#include "hooks.h"
#include "mps_device.h"

namespace sim {
namespace {

namespace py = pybind11;

// torch.mps._host_alias_storage: a CPU storage over the bytes of an mps storage.
py::object host_alias_storage(const py::object& storage) {
  TORCH_CHECK_TYPE(THPStorage_Check(storage.ptr()), "expected a torch.UntypedStorage, got ",
                   std::string(py::str(py::type::of(storage))));
  const auto alias = device_allocator()->getHostAliasStorage(THPStorage_Unpack(storage.ptr()));
  return py::reinterpret_steal<py::object>(THPStorage_Wrap(alias));
}

}  // namespace

void bind_mps_device(py::module_& module) {
  join_torch();
  module.def("_mps_get_name", &device_name);
  module.def("_mps_get_core_count", &device_core_count);
  module.def("_mps_host_alias_storage", &host_alias_storage);
}

}  // namespace sim
