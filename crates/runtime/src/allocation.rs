//! Assigns cores to the two services of a process, and changes the assignment when load hints arrive.

use std::sync::{Mutex, MutexGuard, PoisonError};

use coreward_model::dispatch::{CoreAllocator, CoreAssignmentMode, ReservedCores};

use crate::error::RuntimeError;
use crate::message::HintMessage;
use crate::worker::Worker;

/// Number of services to which cores can be assigned. Service 0 has the higher priority.
pub const SERVICES_WITH_CORES: u8 = 2;

/// Assignment of cores to services, shared by the workers of a process (RingLeader, NSDI'23, Sect. 4.4). The core that
/// receives a hint changes it. [`CoreAllocator`] makes the decisions.
#[derive(Debug)]
pub struct SharedCoreAllocator {
    allocation: Mutex<CoreAllocator>,
}

impl SharedCoreAllocator {
    pub fn new(assignment: CoreAssignmentMode, core_count: u16, reserved_cores: ReservedCores) -> Self {
        Self { allocation: Mutex::new(CoreAllocator::new(assignment, core_count, reserved_cores)) }
    }

    fn lock_allocation(&self) -> MutexGuard<'_, CoreAllocator> {
        self.allocation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enables on a new worker's core the services that are assigned to it.
    pub fn enable_assigned_services(&self, worker: &mut Worker<'_>) -> Result<(), RuntimeError> {
        let allocation = self.lock_allocation();
        let core = worker.core();
        let is_assigned = |service: &u8| allocation.is_running(*service, core);
        (0..SERVICES_WITH_CORES).filter(is_assigned).try_for_each(|service| worker.enable_service(service, core))
    }

    /// Acts on a hint. Enables or disables services on a core, and then rearms the load monitor.
    pub fn apply_hint(&self, hint: HintMessage, worker: &mut Worker<'_>) -> Result<(), RuntimeError> {
        if hint.service < SERVICES_WITH_CORES {
            let has_other_waiting_requests = hint.waiting_services >> (1 - hint.service) & 1 == 1;
            let mut allocation = self.lock_allocation();
            for change in
                allocation.apply_load_hint(hint.service, hint.hint, has_other_waiting_requests, |service, core| {
                    worker.queued_request_count(service, core)
                })
            {
                if change.is_running {
                    worker.enable_service(change.service, change.core)?;
                } else {
                    worker.disable_service(change.service, change.core)?;
                }
            }
        }
        worker.rearm_load_monitor(hint.service)
    }
}
