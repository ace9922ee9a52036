//! Messages of RingLeader's interface between cores and NIC (NSDI'23, Table 1).

use std::num::NonZeroU64;

use coreward_model::dispatch::{LoadCheckInterval, LoadHint, ScaleDownCondition, ScaleUpCondition};

use crate::segment_layout::RawWorkerMessage;

/// Condition under which a service's load monitor sends hints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadHintTrigger {
    /// Sends hints when the service needs more cores.
    ScaleUp(ScaleUpCondition),
    /// Sends hints when the service needs fewer cores.
    ScaleDown(ScaleDownCondition),
}

/// Message from a worker to the orchestrator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerMessage {
    /// Announces that the core's worker serves the service from now on.
    EnableService { service: u8, core: u16 },
    /// Announces that the core accepts no further requests of the service.
    DisableService { service: u8, core: u16 },
    /// Reports the number of requests of the service that the core has completed without sending responses.
    LoadFeedback { service: u8, core: u16, count: u32 },
    /// Enables hints from the service's load monitor under this condition.
    EnableLoadMonitor {
        service: u8,
        /// Condition for sending hints, with times in nanoseconds.
        trigger: LoadHintTrigger,
    },
    /// Permits the service's load monitor to send another hint, because the cores have acted on its last hint.
    RearmLoadMonitor { service: u8 },
}

/// Hint from the orchestrator about the number of a service's cores. It is sent to the worker whose core has the least
/// load of the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadHintMessage {
    pub service: u8,
    pub hint: LoadHint,
    /// Bit mask of the services that have requests waiting for a core. Bit `s` is service `s`.
    pub waiting_service_mask: u64,
}

const MESSAGE_KIND_ENABLE_SERVICE: u8 = 1;
const MESSAGE_KIND_DISABLE_SERVICE: u8 = 2;
const MESSAGE_KIND_LOAD_FEEDBACK: u8 = 3;
const MESSAGE_KIND_SCALE_UP_MONITOR: u8 = 4;
const MESSAGE_KIND_SCALE_DOWN_MONITOR: u8 = 5;
const MESSAGE_KIND_REARM_MONITOR: u8 = 6;

impl From<WorkerMessage> for RawWorkerMessage {
    fn from(message: WorkerMessage) -> Self {
        let new_raw_message = |kind, service, core| Self { message_kind: kind, service, core, ..Self::default() };
        match message {
            WorkerMessage::EnableService { service, core } => {
                new_raw_message(MESSAGE_KIND_ENABLE_SERVICE, service, core)
            }
            WorkerMessage::DisableService { service, core } => {
                new_raw_message(MESSAGE_KIND_DISABLE_SERVICE, service, core)
            }
            WorkerMessage::LoadFeedback { service, core, count } => {
                Self { count, ..new_raw_message(MESSAGE_KIND_LOAD_FEEDBACK, service, core) }
            }
            WorkerMessage::EnableLoadMonitor { service, trigger: LoadHintTrigger::ScaleUp(up) } => Self {
                epoch: up.epoch_length.get().get(),
                ..new_raw_message(MESSAGE_KIND_SCALE_UP_MONITOR, service, 0)
            },
            WorkerMessage::EnableLoadMonitor { service, trigger: LoadHintTrigger::ScaleDown(down) } => Self {
                epoch: down.epoch_length.get().get(),
                threshold: down.max_calm_queue_length,
                count: down.required_calm_epochs,
                ..new_raw_message(MESSAGE_KIND_SCALE_DOWN_MONITOR, service, 0)
            },
            WorkerMessage::RearmLoadMonitor { service } => new_raw_message(MESSAGE_KIND_REARM_MONITOR, service, 0),
        }
    }
}

impl RawWorkerMessage {
    /// Returns the decoded message of a worker, or `None` if this version's workers never send such a message.
    #[inline]
    pub fn to_message(self) -> Option<WorkerMessage> {
        let Self { message_kind: kind, service, core, count, threshold, .. } = self;
        let epoch = NonZeroU64::new(self.epoch).map(LoadCheckInterval::new);
        Some(match kind {
            MESSAGE_KIND_ENABLE_SERVICE => WorkerMessage::EnableService { service, core },
            MESSAGE_KIND_DISABLE_SERVICE => WorkerMessage::DisableService { service, core },
            MESSAGE_KIND_LOAD_FEEDBACK => WorkerMessage::LoadFeedback { service, core, count },
            MESSAGE_KIND_SCALE_UP_MONITOR => WorkerMessage::EnableLoadMonitor {
                service,
                trigger: LoadHintTrigger::ScaleUp(ScaleUpCondition { epoch_length: epoch? }),
            },
            MESSAGE_KIND_SCALE_DOWN_MONITOR => {
                let scale_down_condition = ScaleDownCondition {
                    epoch_length: epoch?,
                    max_calm_queue_length: threshold,
                    required_calm_epochs: count,
                };
                WorkerMessage::EnableLoadMonitor { service, trigger: LoadHintTrigger::ScaleDown(scale_down_condition) }
            }
            MESSAGE_KIND_REARM_MONITOR => WorkerMessage::RearmLoadMonitor { service },
            _ => return None,
        })
    }

    /// Returns the decoded hint of an orchestrator, or `None` if this version's orchestrator never sends such a hint.
    pub fn to_hint(self) -> Option<LoadHintMessage> {
        let load_hint = match self.message_kind {
            MESSAGE_KIND_SCALE_UP_MONITOR => LoadHint::ScaleUp,
            MESSAGE_KIND_SCALE_DOWN_MONITOR => LoadHint::ScaleDown,
            _ => return None,
        };
        Some(LoadHintMessage { service: self.service, hint: load_hint, waiting_service_mask: self.threshold })
    }
}

impl From<LoadHintMessage> for RawWorkerMessage {
    fn from(LoadHintMessage { service, hint, waiting_service_mask: waiting_services }: LoadHintMessage) -> Self {
        let message_kind = match hint {
            LoadHint::ScaleUp => MESSAGE_KIND_SCALE_UP_MONITOR,
            LoadHint::ScaleDown => MESSAGE_KIND_SCALE_DOWN_MONITOR,
        };
        Self { message_kind, service, threshold: waiting_services, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_messages_decode_to_the_same_message() {
        let epoch = LoadCheckInterval::power_of_two(20).unwrap();
        let scale_down_condition =
            ScaleDownCondition { epoch_length: epoch, max_calm_queue_length: 7, required_calm_epochs: 4 };
        for message in [
            WorkerMessage::EnableService { service: 63, core: 255 },
            WorkerMessage::DisableService { service: 1, core: 2 },
            WorkerMessage::LoadFeedback { service: 1, core: 2, count: 3 },
            WorkerMessage::EnableLoadMonitor {
                service: 5,
                trigger: LoadHintTrigger::ScaleUp(ScaleUpCondition { epoch_length: epoch }),
            },
            WorkerMessage::EnableLoadMonitor { service: 5, trigger: LoadHintTrigger::ScaleDown(scale_down_condition) },
            WorkerMessage::RearmLoadMonitor { service: 9 },
        ] {
            assert_eq!(RawWorkerMessage::from(message).to_message(), Some(message));
        }
        for hint in [LoadHint::ScaleUp, LoadHint::ScaleDown] {
            let message = LoadHintMessage { service: 3, hint, waiting_service_mask: 1 << 63 };
            assert_eq!(RawWorkerMessage::from(message).to_hint(), Some(message));
        }
        let message_without_epoch =
            RawWorkerMessage { message_kind: MESSAGE_KIND_SCALE_UP_MONITOR, ..RawWorkerMessage::default() };
        assert_eq!(
            (
                message_without_epoch.to_message(),
                RawWorkerMessage::default().to_message(),
                RawWorkerMessage::default().to_hint()
            ),
            (None, None, None)
        );
    }
}
