#include "python_metal.h"

#include <pybind11/stl.h>

#include <cstring>
#include <map>
#include <optional>

#include "runtime/device_state.h"
#include "runtime/metal_script.h"

namespace py = pybind11;

namespace sim {
namespace {

using script::Buffer;
using script::CommandBuffer;
using script::Constant;
using script::Encoder;
using script::Library;
using script::Pipeline;

using Triple = std::array<uint32_t, 3>;

Extent extent(const Triple& t) {
  return {t[0], t[1], t[2]};
}

std::span<const unsigned char> bytes_of(const py::bytes& bytes) {
  const std::string_view view = bytes;
  return {reinterpret_cast<const unsigned char*>(view.data()), view.size()};
}

template <class T>
std::vector<unsigned char> packed(T value) {
  std::vector<unsigned char> bytes(sizeof(T));
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

// A function constant from Python: the type's MSL name and a number, or its bytes.
Constant constant_from(const std::string& type, const py::object& value) {
  if (py::isinstance<py::bytes>(value)) {
    const auto bytes = bytes_of(value.cast<py::bytes>());
    return {type, {bytes.begin(), bytes.end()}};
  }
  if (type == "bool") return {type, packed(value.cast<bool>())};
  if (type == "float") return {type, packed(value.cast<float>())};
  if (type == "char" || type == "uchar")
    return {type, packed(static_cast<char>(value.cast<int>()))};
  if (type == "short" || type == "ushort") {
    return {type, packed(static_cast<short>(value.cast<int>()))};
  }
  if (type == "int") return {type, packed(value.cast<int32_t>())};
  if (type == "uint") return {type, packed(value.cast<uint32_t>())};
  if (type == "long") return {type, packed(value.cast<int64_t>())};
  if (type == "ulong") return {type, packed(value.cast<uint64_t>())};
  throw py::type_error("function constant of type " + type +
                       ": expected its bytes, found a number");
}

Pipeline make_kernel(const Library& library, const std::string& name,
                     const std::map<uint32_t, std::pair<std::string, py::object>>& constants,
                     uint64_t max_threads) {
  std::vector<std::pair<uint32_t, Constant>> values;
  for (const auto& [index, constant] : constants) {
    values.emplace_back(index, constant_from(constant.first, constant.second));
  }
  py::gil_scoped_release unlocked;
  return library.pipeline(name, values, max_threads);
}

// Host memory that a kernel call uses: copied into a buffer before, and back after it.
struct HostMemory {
  unsigned char* data;
  size_t length;
  uint64_t offset;     // of the binding
  bool is_writable;
  py::buffer_info info;   // keeps the exporter
};

bool is_contiguous(const py::buffer_info& info) {
  py::ssize_t expected = info.itemsize;
  for (py::ssize_t i = info.ndim; i-- > 0;) {
    if (info.shape[i] > 1 && info.strides[i] != expected) return false;
    expected *= info.shape[i];
  }
  return true;
}

// An array (anything with the buffer protocol), an address with a length in bytes, or either of them
// in a tuple with the byte offset to bind at.
HostMemory host_memory(const py::handle& argument) {
  if (py::isinstance<py::tuple>(argument)) {
    const auto pair = argument.cast<py::tuple>();
    if (pair.size() != 2) throw py::type_error("expected a tuple of two");
    if (py::isinstance<py::int_>(pair[0])) {
      auto* data = reinterpret_cast<unsigned char*>(pair[0].cast<uintptr_t>());
      return {data, pair[1].cast<size_t>(), 0, true, {}};
    }
    auto memory = host_memory(pair[0]);
    memory.offset = pair[1].cast<uint64_t>();
    return memory;
  }
  auto info = argument.cast<py::buffer>().request();
  if (!is_contiguous(info)) throw py::value_error("expected a contiguous array");
  return {static_cast<unsigned char*>(info.ptr), static_cast<size_t>(info.size * info.itemsize), 0,
          !info.readonly, std::move(info)};
}

void raise_fault() {
  std::string text;
  while (auto fault = take_fault()) text += (text.empty() ? "" : "\n") + *fault;
  if (!text.empty()) throw std::runtime_error(text);
}

void call_kernel(const Pipeline& kernel, const py::args& arguments, const Triple& grid,
                 const Triple& threadgroup, const std::map<uint64_t, uint64_t>& threadgroup_memory,
                 bool grid_is_threads) {
  raise_fault();
  CommandBuffer commands(true);
  Encoder encoder = commands.compute_encoder(false);
  encoder.set_pipeline(&kernel);
  std::vector<std::pair<HostMemory, Buffer>> buffers;
  for (size_t slot = 0; slot < arguments.size(); ++slot) {
    const py::handle argument = arguments[slot];
    if (argument.is_none()) continue;
    if (py::isinstance<py::bytes>(argument)) {
      encoder.set_bytes(bytes_of(argument.cast<py::bytes>()), slot);
      continue;
    }
    auto memory = host_memory(argument);
    Buffer buffer(std::max<size_t>(memory.length, 1), "argument " + std::to_string(slot));
    std::memcpy(buffer.contents(), memory.data, memory.length);
    encoder.set_buffer(&buffer, memory.offset, slot);
    buffers.emplace_back(std::move(memory), buffer);
  }
  for (const auto& [slot, length] : threadgroup_memory)
    encoder.set_threadgroup_memory(length, slot);
  if (grid_is_threads)
    encoder.dispatch_threads(extent(grid), extent(threadgroup));
  else
    encoder.dispatch_threadgroups(extent(grid), extent(threadgroup));
  encoder.end();
  {
    py::gil_scoped_release unlocked;
    commands.commit();
    commands.wait();
  }
  raise_fault();
  for (auto& [memory, buffer] : buffers) {
    if (memory.is_writable) std::memcpy(memory.data, buffer.contents(), memory.length);
  }
}

void write_buffer(Buffer& buffer, const py::bytes& bytes, size_t offset) {
  const auto source = bytes_of(bytes);
  if (offset > buffer.length() || source.size() > buffer.length() - offset) {
    throw py::value_error("expected bytes that fit into the buffer");
  }
  std::memcpy(buffer.contents() + offset, source.data(), source.size());
}

py::bytes read_buffer(const Buffer& buffer) {
  return {reinterpret_cast<const char*>(buffer.contents()), buffer.length()};
}

void bind_library(py::module_& module) {
  py::class_<Library>(module, "Library", "A library compiled from MSL source.")
      .def(py::init([](const std::string& source, bool fast_math,
                       const std::map<std::string, std::string>& macros, int language_version) {
             py::gil_scoped_release unlocked;
             return Library(source, fast_math, {macros.begin(), macros.end()}, language_version);
           }),
           py::arg("source"), py::arg("fast_math") = true,
           py::arg("macros") = std::map<std::string, std::string>{},
           py::arg("language_version") = 310)
      .def_property_readonly("function_names", &Library::function_names)
      .def("kernel", &make_kernel, py::arg("name"),
           py::arg("constants") = std::map<uint32_t, std::pair<std::string, py::object>>{},
           py::arg("max_threads") = 0);
  py::class_<Pipeline>(module, "Kernel", "A specialised, compiled function. Call it to run it.")
      .def_property_readonly("name", &Pipeline::name)
      .def_property_readonly("max_threads", &Pipeline::max_threads)
      .def_property_readonly("static_threadgroup_bytes", &Pipeline::static_threadgroup_bytes)
      .def("__call__", &call_kernel, py::kw_only(), py::arg("grid"), py::arg("threadgroup"),
           py::arg("threadgroup_memory") = std::map<uint64_t, uint64_t>{},
           py::arg("grid_is_threads") = false,
           "Binds argument i at slot i: an array or (address, nbytes) as a buffer that is copied "
           "back, "
           "(array, offset) at a byte offset, bytes by setBytes, None not at all. `grid` counts "
           "threadgroups, or threads with grid_is_threads.");
}

void bind_commands(py::module_& module) {
  py::class_<Buffer>(module, "Buffer")
      .def(py::init<size_t, const std::string&>(), py::arg("nbytes"), py::arg("label") = "")
      .def("__len__", &Buffer::length)
      .def_property_readonly(
          "address",
          [](const Buffer& self) { return reinterpret_cast<uintptr_t>(self.contents()); })
      .def("write", &write_buffer, py::arg("bytes"), py::arg("offset") = 0)
      .def("read", &read_buffer);
  py::class_<Encoder>(module, "ComputeEncoder")
      .def("set_pipeline", &Encoder::set_pipeline, py::arg("kernel").none(true))
      .def("set_buffer", &Encoder::set_buffer, py::arg("buffer").none(true), py::arg("offset"),
           py::arg("slot"))
      .def("set_buffer_offset", &Encoder::set_buffer_offset, py::arg("offset"), py::arg("slot"))
      .def("set_bytes", [](Encoder& self, const py::bytes& bytes,
                           uint64_t slot) { self.set_bytes(bytes_of(bytes), slot); })
      .def("set_threadgroup_memory", &Encoder::set_threadgroup_memory, py::arg("length"),
           py::arg("slot"))
      .def("dispatch_threadgroups",
           [](Encoder& self, const Triple& grid, const Triple& group) {
             self.dispatch_threadgroups(extent(grid), extent(group));
           })
      .def("dispatch_threads",
           [](Encoder& self, const Triple& grid, const Triple& group) {
             self.dispatch_threads(extent(grid), extent(group));
           })
      .def("barrier", &Encoder::barrier, py::arg("buffers") = std::vector<const Buffer*>{})
      .def("end", &Encoder::end);
  py::class_<CommandBuffer>(module, "CommandBuffer")
      .def(py::init<bool>(), py::arg("retained") = true)
      .def("compute_encoder", &CommandBuffer::compute_encoder, py::arg("concurrent") = false)
      .def("copy", &CommandBuffer::copy)
      .def("fill", &CommandBuffer::fill)
      .def("set_label", &CommandBuffer::set_label)
      .def("commit", &CommandBuffer::commit, py::call_guard<py::gil_scoped_release>())
      .def("wait", &CommandBuffer::wait, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("status", &CommandBuffer::status)
      .def_property_readonly("error", &CommandBuffer::error);
}

}  // namespace

void bind_metal(py::module_& module) {
  module.def("metal_device_name", &script::device_name);
  bind_library(module);
  bind_commands(module);
}

}  // namespace sim
