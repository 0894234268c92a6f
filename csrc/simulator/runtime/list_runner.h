// Runs the commands of one committed list.
#pragma once

#include "command_list.h"

namespace sim {

// Never throws: what goes wrong becomes the list's failure and a reported fault.
void run_list(CommandList& list);

}  // namespace sim
