#include "compiler_entry.h"

namespace sim {
namespace {

struct PositionAttribute {
  const char* name;
  const char* field;
};
constexpr PositionAttribute kPositions[] = {
    {"thread_position_in_grid", "thread_position_in_grid"},
    {"thread_position_in_threadgroup", "thread_position_in_threadgroup"},
    {"threadgroup_position_in_grid", "threadgroup_position_in_grid"},
    {"threads_per_threadgroup", "threads_per_threadgroup"},
    {"dispatch_threads_per_threadgroup", "dispatch_threads_per_threadgroup"},
    {"threads_per_grid", "threads_per_grid"},
    {"threadgroups_per_grid", "threadgroups_per_grid"},
    {"grid_size", "grid_size"},
    {"thread_index_in_threadgroup", "thread_index_in_threadgroup"},
    {"thread_index_in_simdgroup", "thread_index_in_simdgroup"},
    {"simdgroup_index_in_threadgroup", "simdgroup_index_in_threadgroup"},
    {"simdgroups_per_threadgroup", "simdgroups_per_threadgroup"},
    {"dispatch_simdgroups_per_threadgroup", "simdgroups_per_threadgroup"},
    {"threads_per_simdgroup", "threads_per_simdgroup"},
    {"thread_execution_width", "threads_per_simdgroup"},
};

}  // namespace

std::string attributes_class(const Tokens& tokens, const Function& f) {
  std::string parameters, positions, max_threads = "0";
  uint32_t count = 0;
  for (const Parameter& p : parse_parameters(tokens, f.parameters)) {
    std::string kind = "::sim::kBuffer", slot = "::sim::kNextFreeSlot", exists = "true";
    for (const Attribute& a : p.attributes) {
      const std::string argument = "(" + text_of(tokens, a.arguments) + ")";
      if (a.name == "buffer") slot = argument;
      if (a.name == "function_constant") exists = argument;
      if (a.name == "threadgroup") kind = "::sim::kThreadgroupBuffer", slot = argument;
      for (const PositionAttribute& position : kPositions) {
        if (a.name != position.name) continue;
        kind = "::sim::kPosition";
        positions += "if constexpr (I == " + std::to_string(count) + ") return (me->" +
                     position.field + "); else ";
      }
    }
    parameters += "{" + kind + ", static_cast<uint32_t>(" + slot + "), bool(" + exists + "), \"" +
                  p.name + "\"}, ";
    ++count;
  }
  if (const Attribute* a = find_attribute(f.attributes, "max_total_threads_per_threadgroup")) {
    max_threads = text_of(tokens, a->arguments);
  }
  const std::string header =
      f.template_header.is_empty() ? "" : "template " + text_of(tokens, f.template_header) + " ";
  return " " + header + "struct sim_attributes_" + f.name +
         " { static constexpr uint32_t count = " + std::to_string(count) +
         ", max_total_threads = (" + max_threads +
         "); static constexpr ::sim::ParameterAttributes parameters[count + 1] = {" + parameters +
         "{}}; template <unsigned I> SIM_HIDDEN static METAL_FUNC decltype(auto) position("
         "const ::sim::Thread* me) { " +
         positions + "return 0u; } };";
}

std::string entry_text(const Tokens& tokens, const KernelName& kernel) {
  const auto& namespaces =
      kernel.instantiation ? kernel.instantiation->namespaces : kernel.function->namespaces;
  const std::string id =
      kernel.instantiation ? kernel.instantiation->template_id : kernel.function->name;
  std::string attributes = id;
  attributes.insert(attributes.find(kernel.function->name), "sim_attributes_");
  std::string open, close, path;
  for (const std::string& name : namespaces) {
    open += "namespace " + name + " { ";
    close += "} ";
    path += "::" + name;
  }
  const Token& name = tokens[kernel.function->name_token];
  const std::string marker =
      "\n# " + std::to_string(name.line) + " \"" + tokens.files[name.file] + "\"\n";
  return marker + open + "struct sim_entry_traits : " + attributes +
         " { static constexpr auto* function = &" + id +
         "; using types = ::sim::FunctionTypes<decltype(&" + id + ")>; }; " + close + marker +
         "SIM_KERNEL_ENTRY(" + path + "::sim_entry_traits)\n";
}

}  // namespace sim
