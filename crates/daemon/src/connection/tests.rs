//! Tests of the order in which controllers are tried, partly with real listeners on loopback.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use coreward_rpc::v1::control_client::ControlClient;
use coreward_wire::v1;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::body::Body;

use super::*;

const FIRST_CONNECT_RETRY_INTERVAL: Duration = CONNECT_RETRY_INTERVAL_RANGE.0;

#[test]
fn single_controller_is_retried_at_growing_intervals() {
    let mut attempt_order = ConnectionAttemptOrder::new(1);
    let retry_intervals_ms: Vec<u128> = (0..7)
        .map(|_| attempt_order.record_attempt_end(&ControllerStreamEndReason::ControllerLost).as_millis())
        .collect();
    assert_eq!(retry_intervals_ms, [100, 200, 400, 800, 1600, 2000, 2000]);
    attempt_order.record_answer();
    assert_eq!(
        attempt_order.record_attempt_end(&ControllerStreamEndReason::ControllerLost),
        FIRST_CONNECT_RETRY_INTERVAL
    );
    assert_eq!(
        attempt_order.record_attempt_end(&ControllerStreamEndReason::ControllerLost),
        FIRST_CONNECT_RETRY_INTERVAL
    );
    assert_eq!(
        attempt_order.record_attempt_end(&ControllerStreamEndReason::ControllerLost),
        FIRST_CONNECT_RETRY_INTERVAL * 2
    );
}

#[test]
fn retry_interval_grows_after_each_round_of_controllers() {
    let mut attempt_order = ConnectionAttemptOrder::new(3);
    let mut controllers_and_intervals = Vec::new();
    for _ in 0..7 {
        let retry_interval_ms =
            attempt_order.record_attempt_end(&ControllerStreamEndReason::ControllerLost).as_millis();
        controllers_and_intervals.push((attempt_order.current_controller_index, retry_interval_ms));
    }
    assert_eq!(controllers_and_intervals, [(1, 100), (2, 100), (0, 100), (1, 100), (2, 100), (0, 200), (1, 100)]);
}

#[test]
fn controller_that_answered_last_is_tried_first() {
    let mut attempt_order = ConnectionAttemptOrder::new(3);
    attempt_order.record_attempt_end(&ControllerStreamEndReason::ControllerLost);
    attempt_order.record_answer();
    assert_eq!(
        (
            attempt_order.record_attempt_end(&ControllerStreamEndReason::ControllerLost),
            attempt_order.current_controller_index
        ),
        (FIRST_CONNECT_RETRY_INTERVAL, 1)
    );
    assert_eq!(
        (
            attempt_order.record_attempt_end(&ControllerStreamEndReason::ControllerLost),
            attempt_order.current_controller_index
        ),
        (FIRST_CONNECT_RETRY_INTERVAL, 2)
    );
}

#[test]
fn leader_named_by_follower_is_tried_next() {
    let mut attempt_order = ConnectionAttemptOrder::new(3);
    assert_eq!(
        (
            attempt_order.record_attempt_end(&ControllerStreamEndReason::RedirectedToController(2)),
            attempt_order.current_controller_index
        ),
        (FIRST_CONNECT_RETRY_INTERVAL, 2)
    );
    attempt_order.record_answer();
    assert_eq!(
        (
            attempt_order.record_attempt_end(&ControllerStreamEndReason::RedirectedToController(0)),
            attempt_order.current_controller_index
        ),
        (FIRST_CONNECT_RETRY_INTERVAL, 0)
    );
    // Two controllers that name each other as leader are tried less and less often.
    let retry_intervals_ms: Vec<u128> = (0..9)
        .map(|n| {
            attempt_order.record_attempt_end(&ControllerStreamEndReason::RedirectedToController(n % 2)).as_millis()
        })
        .collect();
    assert_eq!(retry_intervals_ms, [100, 100, 100, 100, 100, 200, 100, 100, 400]);
}

#[test]
fn leader_with_older_term_is_rejected_for_one_minute() {
    let (start, mut terms) = (Instant::now(), LeaderTermTracker::default());
    let time_at_seconds = |seconds| start + Duration::from_secs(seconds);
    // Controllers with their own store, or with an older version, send no term.
    terms.check_term(None, time_at_seconds(0)).unwrap();
    terms.check_term(Some(9), time_at_seconds(1)).unwrap();
    terms.record_message_time(time_at_seconds(30));
    let error = terms.check_term(Some(8), time_at_seconds(89)).unwrap_err().to_string();
    assert_eq!(error, "its term is older than that of the last controller (term 8, expected 9 or more)");
    terms.check_term(Some(9), time_at_seconds(89)).unwrap();
    terms.check_term(Some(12), time_at_seconds(90)).unwrap();
    terms.check_term(Some(11), time_at_seconds(149)).unwrap_err();
    // The term now comes from another etcd.
    terms.check_term(Some(2), time_at_seconds(150)).unwrap();
    terms.check_term(Some(1), time_at_seconds(151)).unwrap_err();
    terms.check_term(None, time_at_seconds(152)).unwrap();
    terms.check_term(Some(1), time_at_seconds(153)).unwrap();
}

#[tokio::test]
async fn leader_term_is_read_from_response_metadata() {
    let mut connection = prepare_connection(&[find_unused_address()]);
    let response_with_term = |term: Option<u64>| {
        let mut response = Response::new(());
        term.into_iter()
            .for_each(|term| drop(response.metadata_mut().insert(CONTROLLER_TERM_METADATA_KEY, term.into())));
        response
    };
    connection.accept_stream(response_with_term(Some(7))).unwrap();
    let error = connection.accept_stream(response_with_term(Some(6))).unwrap_err();
    // This error does not count as a rejection of the daemon, so the other controllers are tried at once.
    assert_eq!(connection.classify_stream_end(Some(&error)), ControllerStreamEndReason::ControllerLost);
    connection.accept_stream(response_with_term(Some(7))).unwrap();
}

#[test]
fn controller_is_retried_after_a_rejection() {
    let mut attempt_order = ConnectionAttemptOrder::new(2);
    assert_eq!(
        (
            attempt_order.record_attempt_end(&ControllerStreamEndReason::RejectedByController),
            attempt_order.current_controller_index
        ),
        (CONNECT_RETRY_INTERVAL_AFTER_REJECTION, 1)
    );
}

#[test]
fn retry_pauses_are_random() {
    let pauses: Vec<Duration> = (0..100).map(|_| interval_with_jitter(Duration::from_secs(2))).collect();
    assert!(pauses.iter().all(|pause| (Duration::from_secs(1)..=Duration::from_secs(2)).contains(pause)));
    assert!(pauses.iter().any(|pause| *pause != pauses[0]));
}

/// Controller of a test: a gRPC server that answers every request with the same status.
#[derive(Clone)]
struct FixedStatusServer(Status);

impl tonic::server::NamedService for FixedStatusServer {
    const NAME: &'static str = "coreward.v1.Control";
}

impl tower_service::Service<http::Request<Body>> for FixedStatusServer {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<Body>) -> Self::Future {
        let response = self.0.clone().into_http();
        Box::pin(async { Ok(response) })
    }
}

/// Starts a controller that answers every request with this status until the runtime ends.
async fn start_server_with_status(status: Status) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tonic::transport::Server::builder().add_service(FixedStatusServer(status));
    tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
    address
}

/// Returns an address at which no process listens. Its port stays bound, so that no other test uses it.
fn find_unused_address() -> SocketAddr {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    std::mem::forget(socket);
    address
}

fn not_leader_status(leader: Option<SocketAddr>) -> Status {
    let mut status = Status::unavailable("this controller does not lead");
    if let Some(leader) = leader {
        status.metadata_mut().insert(LEADER_ADDRESS_METADATA_KEY, leader.to_string().parse().unwrap());
    }
    status
}

/// Tries controllers as a daemon does, but without pauses, until one answers. Returns the tried addresses.
async fn try_controllers(connection: &mut ControllerConnection, max_attempts: usize) -> Vec<SocketAddr> {
    let mut tried_addresses = Vec::new();
    for _ in 0..max_attempts {
        tried_addresses.push(connection.next_controller_address());
        let result: anyhow::Result<()> = async {
            let channel = connection.connect().await?;
            ControlClient::new(channel).fleet(v1::FleetRequest {}).await?;
            Ok(())
        }
        .await;
        let error = result.unwrap_err();
        if error.downcast_ref::<Status>().is_some_and(|status| status.code() == Code::Internal) {
            connection.record_controller_message();
            break;
        }
        connection.record_stream_end(Some(&error));
    }
    tried_addresses
}

fn prepare_connection(addresses: &[SocketAddr]) -> ControllerConnection {
    let text = format!("controller = {:?}\n", addresses.iter().map(ToString::to_string).collect::<Vec<_>>());
    coreward_config::config_struct! {
        struct ControllersFile {
            controller: ControllerAddresses,
        }
    }
    let source = coreward_config::TomlSource::from_text("lb.toml", &text);
    ControllerConnection::new(
        source.read_as(|file: ControllersFile, _| Some(file.controller)).unwrap(),
        None,
        &[FleetRole::Controller],
    )
    .unwrap()
}

#[tokio::test]
async fn daemon_finds_the_leader_among_several_controllers() {
    let leader = start_server_with_status(Status::internal("here")).await;
    let (absent_controller, follower) =
        (find_unused_address(), start_server_with_status(not_leader_status(None)).await);
    let mut connection = prepare_connection(&[absent_controller, follower, leader]);
    assert_eq!(try_controllers(&mut connection, 9).await, [absent_controller, follower, leader]);
    connection.record_stream_end(None);
    assert_eq!(try_controllers(&mut connection, 9).await, [leader], "it answered last");
}

#[tokio::test]
async fn daemon_connects_to_the_leader_named_by_a_follower() {
    let leader = start_server_with_status(Status::internal("here")).await;
    let (absent_controller, follower) =
        (find_unused_address(), start_server_with_status(not_leader_status(Some(leader))).await);
    let mut connection = prepare_connection(&[follower, absent_controller, leader]);
    assert_eq!(try_controllers(&mut connection, 9).await, [follower, leader]);
}

#[tokio::test]
async fn leader_missing_from_configuration_is_not_contacted() {
    let unlisted_leader = start_server_with_status(Status::internal("here")).await;
    let (absent_controller, follower) =
        (find_unused_address(), start_server_with_status(not_leader_status(Some(unlisted_leader))).await);
    let mut connection = prepare_connection(&[follower, absent_controller]);
    assert_eq!(try_controllers(&mut connection, 4).await, [follower, absent_controller, follower, absent_controller]);
}

#[tokio::test]
async fn daemon_tries_other_controllers_after_a_rejection() {
    let leader = start_server_with_status(Status::internal("here")).await;
    let rejecting_controller = start_server_with_status(Status::not_found("server s1 is not in the fleet")).await;
    let mut connection = prepare_connection(&[rejecting_controller, leader]);
    assert_eq!(try_controllers(&mut connection, 9).await, [rejecting_controller, leader]);
}
