//! Assigns cores to the two services of a process, and changes the assignment when load hints arrive.

use std::sync::{Mutex, MutexGuard, PoisonError};

use coreward_model::dispatch::{CoreAllocator, CoreAssignmentMode, ReservedCores};

use crate::error::RuntimeError;
use crate::worker::Worker;
use crate::worker_message::LoadHintMessage;

/// Number of services to which cores can be assigned. Service 0 has the higher priority.
pub const ASSIGNABLE_SERVICE_COUNT: u8 = 2;

/// Assignment of cores to services, which the workers of a process share (RingLeader, NSDI'23, Sect. 4.4). The worker
/// that receives a hint changes the assignment. [`CoreAllocator`] makes the decisions.
#[derive(Debug)]
pub struct SharedCoreAllocator {
    core_allocator: Mutex<CoreAllocator>,
}

impl SharedCoreAllocator {
    pub fn new(assignment: CoreAssignmentMode, core_count: u16, reserved_cores: ReservedCores) -> Self {
        Self { core_allocator: Mutex::new(CoreAllocator::new(assignment, core_count, reserved_cores)) }
    }

    fn lock_core_allocator(&self) -> MutexGuard<'_, CoreAllocator> {
        self.core_allocator.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enables the services that are assigned to the core of a new worker.
    pub fn enable_assigned_services(&self, worker: &mut Worker<'_>) -> Result<(), RuntimeError> {
        let core_allocator = self.lock_core_allocator();
        let core = worker.core();
        let is_assigned = |service: &u8| core_allocator.is_service_assigned(*service, core);
        (0..ASSIGNABLE_SERVICE_COUNT).filter(is_assigned).try_for_each(|service| worker.enable_service(service, core))
    }

    /// Applies a hint: enables or disables services on cores as [`CoreAllocator`] decides, and then rearms the load
    /// monitor.
    pub fn apply_hint(&self, hint: LoadHintMessage, worker: &mut Worker<'_>) -> Result<(), RuntimeError> {
        if hint.service < ASSIGNABLE_SERVICE_COUNT {
            let has_other_service_waiting_requests = hint.waiting_service_mask >> (1 - hint.service) & 1 == 1;
            let mut core_allocator = self.lock_core_allocator();
            for change in core_allocator.apply_load_hint(
                hint.service,
                hint.hint,
                has_other_service_waiting_requests,
                |service, core| worker.queued_request_count(service, core),
            ) {
                if change.is_assigned {
                    worker.enable_service(change.service, change.core)?;
                } else {
                    worker.disable_service(change.service, change.core)?;
                }
            }
        }
        worker.rearm_load_monitor(hint.service)
    }
}
