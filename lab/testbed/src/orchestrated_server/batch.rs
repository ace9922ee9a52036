//! Client of the batch service, which keeps requests outstanding so that the service always has work.

use std::net::UdpSocket;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use anyhow::Context as _;
use coreward_load::key_value::{KeyValueRequest, MAX_DATAGRAM_BYTES};
use coreward_load::request_type::RequestType;
use coreward_runtime::worker::OrchestratorConnection;

use super::POLL_OR_RECONNECT_INTERVAL;

/// Number of the service to which the batch's requests are sent.
const BATCH_SERVICE_NUMBER: u8 = 1;
/// Time without any response after which all outstanding requests of the batch count as lost.
const BATCH_RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Keeps `window` requests outstanding, each with a service time of `service_us` (us), until `stop_flag` is set.
/// Restarts after an error, such as the end of the orchestrator.
pub fn run_batch_client(memory: &Path, window: usize, service_us: u32, stop_flag: &AtomicBool) {
    while !stop_flag.load(Relaxed) {
        if let Err(error) = send_batch_requests(memory, window, service_us, stop_flag) {
            tracing::warn!(
                event = "batch-failed",
                error = format!("{error:#}"),
                "the batch client cannot exchange requests with the orchestrator: the client starts again"
            );
            std::thread::sleep(POLL_OR_RECONNECT_INTERVAL);
        }
    }
}

fn send_batch_requests(memory: &Path, window: usize, service_us: u32, stop_flag: &AtomicBool) -> anyhow::Result<()> {
    let services = OrchestratorConnection::connect(memory)?.service_entries();
    let batch_service =
        services.get(usize::from(BATCH_SERVICE_NUMBER)).context("one service: expected a second one for the batch")?;
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.set_read_timeout(Some(BATCH_RESPONSE_TIMEOUT))?;
    let request_type = RequestType::with_work_class(BATCH_SERVICE_NUMBER).expect("below 16");
    let (mut request_id, mut outstanding_count, mut buffer) = (0, 0, [0; MAX_DATAGRAM_BYTES]);
    let mut datagram = Vec::new();
    while !stop_flag.load(Relaxed) {
        while outstanding_count < window {
            let request =
                KeyValueRequest { request_type, request_id, service_ns: service_us * 1000, key: b"", value: b"" };
            request.write_datagram(&mut datagram);
            socket.send_to(&datagram, batch_service.address)?;
            (request_id, outstanding_count) = (request_id.wrapping_add(1), outstanding_count + 1);
        }
        outstanding_count = if socket.recv(&mut buffer).is_ok() { outstanding_count - 1 } else { 0 };
    }
    Ok(())
}
