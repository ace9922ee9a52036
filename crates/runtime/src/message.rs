//! Messages of RingLeader's interface between cores and NIC (NSDI'23, Table 1).

use std::num::NonZeroU64;

use coreward_model::dispatch::{Epoch, LoadHint, ScaleDown, ScaleUp};

use crate::layout::RawMessage;

/// Condition of a load hint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trigger {
    /// A service needs more cores.
    ScaleUp(ScaleUp),
    /// A service needs fewer cores.
    ScaleDown(ScaleDown),
}

/// A message from a worker to the orchestrator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    /// The core runs the service from now on.
    EnableService { service: u8, core: u16 },
    /// The core takes no new requests of the service.
    DisableService { service: u8, core: u16 },
    /// The core has completed requests of the service without a response.
    LoadFeedback {
        service: u8,
        core: u16,
        /// Completed requests.
        count: u32,
    },
    /// The load monitor of the service sends hints by this condition.
    EnableLoadMonitor {
        service: u8,
        /// Condition; times in nanoseconds.
        trigger: Trigger,
    },
    /// The cores have acted on the last hint of the service.
    RearmLoadMonitor { service: u8 },
}

/// A message from the orchestrator to the worker of the least loaded core of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HintMessage {
    pub service: u8,
    pub hint: LoadHint,
    /// Services with requests that no core takes: bit s is service s.
    pub waiting: u64,
}

const ENABLE: u8 = 1;
const DISABLE: u8 = 2;
const FEEDBACK: u8 = 3;
const MONITOR_UP: u8 = 4;
const MONITOR_DOWN: u8 = 5;
const REARM: u8 = 6;

impl From<Message> for RawMessage {
    fn from(message: Message) -> Self {
        let raw = |kind, service, core| Self { kind, service, core, ..Self::default() };
        match message {
            Message::EnableService { service, core } => raw(ENABLE, service, core),
            Message::DisableService { service, core } => raw(DISABLE, service, core),
            Message::LoadFeedback { service, core, count } => Self { count, ..raw(FEEDBACK, service, core) },
            Message::EnableLoadMonitor { service, trigger: Trigger::ScaleUp(up) } => {
                Self { epoch: up.epoch.get().get(), ..raw(MONITOR_UP, service, 0) }
            }
            Message::EnableLoadMonitor { service, trigger: Trigger::ScaleDown(down) } => Self {
                epoch: down.epoch.get().get(),
                threshold: down.threshold,
                count: down.calm_epochs,
                ..raw(MONITOR_DOWN, service, 0)
            },
            Message::RearmLoadMonitor { service } => raw(REARM, service, 0),
        }
    }
}

impl RawMessage {
    /// Returns the message from a worker. `None`: no worker of this version sends it.
    #[inline]
    pub fn message(self) -> Option<Message> {
        let Self { kind, service, core, count, threshold, .. } = self;
        let epoch = NonZeroU64::new(self.epoch).map(Epoch::new);
        Some(match kind {
            ENABLE => Message::EnableService { service, core },
            DISABLE => Message::DisableService { service, core },
            FEEDBACK => Message::LoadFeedback { service, core, count },
            MONITOR_UP => Message::EnableLoadMonitor { service, trigger: Trigger::ScaleUp(ScaleUp { epoch: epoch? }) },
            MONITOR_DOWN => {
                let down = ScaleDown { epoch: epoch?, threshold, calm_epochs: count };
                Message::EnableLoadMonitor { service, trigger: Trigger::ScaleDown(down) }
            }
            REARM => Message::RearmLoadMonitor { service },
            _ => return None,
        })
    }

    /// Returns the message from the orchestrator. `None`: no orchestrator of this version sends it.
    pub fn hint(self) -> Option<HintMessage> {
        let hint = match self.kind {
            MONITOR_UP => LoadHint::ScaleUp,
            MONITOR_DOWN => LoadHint::ScaleDown,
            _ => return None,
        };
        Some(HintMessage { service: self.service, hint, waiting: self.threshold })
    }
}

impl From<HintMessage> for RawMessage {
    fn from(HintMessage { service, hint, waiting }: HintMessage) -> Self {
        let kind = match hint {
            LoadHint::ScaleUp => MONITOR_UP,
            LoadHint::ScaleDown => MONITOR_DOWN,
        };
        Self { kind, service, threshold: waiting, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip() {
        let epoch = Epoch::power_of_two(20).unwrap();
        let down = ScaleDown { epoch, threshold: 7, calm_epochs: 4 };
        for message in [
            Message::EnableService { service: 63, core: 255 },
            Message::DisableService { service: 1, core: 2 },
            Message::LoadFeedback { service: 1, core: 2, count: 3 },
            Message::EnableLoadMonitor { service: 5, trigger: Trigger::ScaleUp(ScaleUp { epoch }) },
            Message::EnableLoadMonitor { service: 5, trigger: Trigger::ScaleDown(down) },
            Message::RearmLoadMonitor { service: 9 },
        ] {
            assert_eq!(RawMessage::from(message).message(), Some(message));
        }
        for hint in [LoadHint::ScaleUp, LoadHint::ScaleDown] {
            let message = HintMessage { service: 3, hint, waiting: 1 << 63 };
            assert_eq!(RawMessage::from(message).hint(), Some(message));
        }
        let no_epoch = RawMessage { kind: MONITOR_UP, ..RawMessage::default() };
        assert_eq!(
            (no_epoch.message(), RawMessage::default().message(), RawMessage::default().hint()),
            (None, None, None)
        );
    }
}
