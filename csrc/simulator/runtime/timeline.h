// The order in which the GPU runs what queues commit, and when.
//
// Committed work runs as late as a Mac could: when somebody waits for it, asks how far it is, or when
// too much is pending. A host that reads a result too early therefore finds the old bytes.
#pragma once

#include <memory>

#include "command_list.h"

namespace sim {

void submit(std::shared_ptr<CommandList> list);
// Runs everything up to and including `list`; returns when it is over. False when the list was never
// committed, so that a wait for it would last forever.
bool run_until(const std::shared_ptr<CommandList>& list);
// Runs everything that has been committed.
void run_all();

}  // namespace sim
