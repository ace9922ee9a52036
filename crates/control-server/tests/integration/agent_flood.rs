//! Tests, over real gRPC, of an agent that sends more than it may.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use coreward_controller::message_rejection::MAX_REPORTS_PER_BURST;
use coreward_wire::v1;
use coreward_wire::v1::agent_message::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use crate::support::{RunningController, TestDirectory, with_timeout};

const WEB_SERVICE_TOML: &str = "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\npolicy = \"crossrss\"\n";
/// Report interval in the fleet document that `support::TestDirectory` writes.
const REPORT_INTERVAL: Duration = Duration::from_millis(10);
/// Number of sent reports of about 60 bytes each. Together they exceed HTTP/2's flow-control windows (256 KiB).
const REPORT_COUNT: u64 = 40_000;

async fn open_agent_stream(
    controller: &RunningController,
    server: &str,
) -> (mpsc::Sender<v1::AgentMessage>, Streaming<v1::AgentUpdate>) {
    let (sender, receiver) = mpsc::channel(4);
    let registration = v1::AgentRegistration { server: server.into(), version: "test".into() };
    sender.send(to_agent_message(Message::Registration(registration))).await.unwrap();
    let updates =
        controller.connect_control_client().await.agent(ReceiverStream::new(receiver)).await.unwrap().into_inner();
    (sender, updates)
}

fn to_agent_message(message: Message) -> v1::AgentMessage {
    v1::AgentMessage { message: Some(message) }
}

fn build_report_message(sequence: u64) -> v1::AgentMessage {
    to_agent_message(Message::Report(v1::Report {
        sequence,
        sent_unix_ns: SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64,
        time_to_live_ms: 60_000,
        measured_ns: sequence * 1_000_000,
        core_busy_ns: vec![sequence; 2],
        without_details: true,
        ..Default::default()
    }))
}

/// Returns the number of reports that the controller has decoded, whether it accepted or rejected them.
async fn read_decoded_report_count(controller: &RunningController) -> u64 {
    let status = controller.fetch_status().await;
    let report_rejection_reasons = ["too_often", "out_of_order", "clock_stalled", "impossible_load"];
    status.accepted_reports
        + report_rejection_reasons.iter().map(|reason| status.rejected_reports[*reason]).sum::<u64>()
}

/// Sends reports as fast as the connection accepts them. The controller's HTTP/2 implementation ends a connection on
/// which many small frames wait to be read. Reports are then sent on another connection.
async fn send_report_flood(controller: Arc<RunningController>) {
    loop {
        let (sender, _updates) = open_agent_stream(&controller, "s1").await;
        let mut sequence = 0;
        while sender.send(build_report_message(sequence)).await.is_ok() {
            sequence += 1;
            if sequence == REPORT_COUNT {
                return;
            }
        }
    }
}

#[tokio::test]
async fn flooding_agent_is_read_at_its_rate_limit() {
    let test_directory = TestDirectory::new(&["s1", "s2"], WEB_SERVICE_TOML);
    let controller = test_directory.start_controller().await;
    let controller = Arc::new(controller);
    let start_time = Instant::now();
    let flood_task = tokio::spawn(send_report_flood(controller.clone()));
    let report_burst = u64::from(MAX_REPORTS_PER_BURST);
    with_timeout("the reports that it may send at once", async {
        while read_decoded_report_count(&controller).await < report_burst {}
    })
    .await;
    // Another agent's reports are accepted meanwhile.
    let (other_sender, _updates) = open_agent_stream(&controller, "s2").await;
    for sequence in 1..=10 {
        other_sender.send(build_report_message(sequence)).await.unwrap();
    }
    let has_other_agent_reported = async || {
        let status = controller.fetch_status().await;
        status.servers.iter().any(|server| server.name == "s2" && server.report_age_ms < 60_000)
    };
    with_timeout("the other agent's reports", async { while !has_other_agent_reported().await {} }).await;
    for _ in 0..200 {
        let decoded_count = read_decoded_report_count(&controller).await;
        // The count includes two reports per interval, the burst, the other agent's reports, and one event for
        // exceeding the limit.
        let allowed_report_count = start_time.elapsed().as_nanos() * 2 / REPORT_INTERVAL.as_nanos();
        let max_decoded_count = 2 * (u64::try_from(allowed_report_count).unwrap() + report_burst) + 12;
        assert!(decoded_count <= max_decoded_count, "{decoded_count} decoded, at most {max_decoded_count} expected");
        assert!(!flood_task.is_finished(), "{REPORT_COUNT} reports were read on one stream");
    }
    let rejection_counts = controller.fetch_status().await.rejected_reports;
    assert!(rejection_counts["too_often"] > 0, "a delay is counted");
    flood_task.abort();
}

async fn wait_for_stream_end(mut updates: Streaming<v1::AgentUpdate>) -> Status {
    loop {
        match with_timeout("the end of the stream", updates.message()).await {
            Ok(update) => assert!(update.is_some(), "the stream ended without an error"),
            Err(status) => return status,
        }
    }
}

#[tokio::test]
async fn message_larger_than_256_kib_ends_an_agents_stream() {
    let test_directory = TestDirectory::new(&["s1", "s2"], WEB_SERVICE_TOML);
    let controller = test_directory.start_controller().await;
    for (server, bytes, code) in [("s1", 200 << 10, None), ("s2", 300 << 10, Some(Code::OutOfRange))] {
        let (sender, updates) = open_agent_stream(&controller, server).await;
        let warnings = vec!["w".repeat(bytes)];
        let large_report = v1::Report { warnings, time_to_live_ms: 1, core_busy_ns: vec![1], ..Default::default() };
        sender.send(to_agent_message(Message::Report(large_report))).await.unwrap();
        match code {
            Some(code) => {
                let end_status = wait_for_stream_end(updates).await;
                assert_eq!(end_status.code(), code, "{end_status}");
                assert!(end_status.message().contains("262144"), "{end_status}");
            }
            None => {
                with_timeout("the report", async { while read_decoded_report_count(&controller).await == 0 {} }).await
            }
        }
    }
}
