//! Receives requests through AF_XDP. UDP sockets receive the requests that AF_XDP passes on, or all if it is not used.

use std::net::SocketAddrV4;
use std::os::fd::BorrowedFd;

use coreward_dataplane::intake::queue::FrameCopyMode;
use coreward_dataplane::intake::{DatagramIntake, RequestDatagram};

use crate::config::OrchestratorConfig;

/// Receiver of requests through AF_XDP. It receives none if AF_XDP is not configured or not available.
#[derive(Debug, Default)]
pub struct RequestIntake {
    af_xdp_intake: Option<DatagramIntake>,
    /// Reason why AF_XDP is not in use although the configuration requests it.
    fallback_reason: Option<String>,
    /// Counters of the AF_XDP intake when it ended. The list is empty before that.
    final_counters: DatagramCounters,
}

type DatagramCounters = Vec<(&'static str, u64)>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestIntakeStatus {
    /// Name of the way in which requests are received: `socket`, `socket-fallback`, `af-xdp` or `af-xdp-zero-copy`.
    pub mode_name: &'static str,
    pub fallback_reason: Option<String>,
    /// Number of datagrams received through AF_XDP, by outcome. The list is empty if AF_XDP was not used.
    pub datagram_counters: DatagramCounters,
}

impl RequestIntake {
    /// Opens the AF_XDP sockets if AF_XDP is configured. If this fails, for example without the capabilities NET_RAW,
    /// NET_ADMIN and BPF, requests are received by the UDP sockets instead.
    pub fn open(config: &OrchestratorConfig) -> Self {
        let mut request_intake = Self::default();
        let Some(interface) = &config.af_xdp_interface else { return request_intake };
        let listen_addresses: Vec<SocketAddrV4> = config.listeners.iter().map(|(address, _)| *address).collect();
        match DatagramIntake::open(interface, &listen_addresses) {
            Ok(datagram_intake) => {
                request_intake.af_xdp_intake = Some(datagram_intake);
                tracing::info!(
                    event = "intake-opened",
                    interface,
                    mode = request_intake.intake_mode_name(),
                    "the orchestrator receives requests by AF_XDP"
                );
            }
            Err(error) => request_intake.fall_back_to_sockets(format!("{error:#}")),
        }
        request_intake
    }

    fn fall_back_to_sockets(&mut self, reason: String) {
        tracing::warn!(
            event = "intake-fallback",
            reason,
            "the orchestrator cannot use AF_XDP and receives requests by UDP sockets"
        );
        self.final_counters = self.datagram_counters();
        self.af_xdp_intake = None;
        self.fallback_reason = Some(reason);
    }

    /// Passes a batch of requests from each AF_XDP receive queue to `accept`. Returns the number of requests.
    pub fn receive_batches(&mut self, accept: &mut impl FnMut(RequestDatagram<'_>)) -> usize {
        match self.af_xdp_intake.as_mut().map(|intake| intake.receive_batches(accept)) {
            Some(Ok(received_count)) => received_count,
            Some(Err(error)) => {
                self.fall_back_to_sockets(format!("cannot receive: {error}"));
                0
            }
            None => 0,
        }
    }

    /// Falls back to the UDP sockets if the device no longer exists. Must be called every few milliseconds.
    pub fn fall_back_if_device_gone(&mut self) {
        if let Some(Err(error)) = self.af_xdp_intake.as_ref().map(DatagramIntake::check_device_exists) {
            self.fall_back_to_sockets(format!("the device is gone: {error}"));
        }
    }

    /// Returns the AF_XDP sockets, on which the caller can wait for requests.
    pub fn af_xdp_sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.af_xdp_intake.iter().flat_map(DatagramIntake::socket_fds)
    }

    pub fn status(&self) -> RequestIntakeStatus {
        RequestIntakeStatus {
            mode_name: self.intake_mode_name(),
            fallback_reason: self.fallback_reason.clone(),
            datagram_counters: self.datagram_counters(),
        }
    }

    fn intake_mode_name(&self) -> &'static str {
        match &self.af_xdp_intake {
            Some(intake) if intake.copy_mode() == FrameCopyMode::ZeroCopy => "af-xdp-zero-copy",
            Some(_) => "af-xdp",
            None if self.fallback_reason.is_some() => "socket-fallback",
            None => "socket",
        }
    }

    fn datagram_counters(&self) -> DatagramCounters {
        let Some(intake) = &self.af_xdp_intake else { return self.final_counters.clone() };
        intake.counters().unwrap_or_else(|error| {
            tracing::warn!(
                event = "intake-counters-unread",
                error = format!("{error:#}"),
                "the orchestrator cannot read the AF_XDP counters: its report omits them"
            );
            DatagramCounters::new()
        })
    }
}
