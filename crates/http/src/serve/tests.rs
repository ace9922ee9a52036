//! Tests of the eviction of idle connections, over loopback.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::routing::get;
use hyper::body::Frame;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;
use tokio::time::{Interval, interval, timeout};

use super::*;

const CONDITION_TIMEOUT: Duration = Duration::from_secs(30);
const UNREACHED_REQUEST_HEAD_TIMEOUT: Duration = Duration::from_secs(3600);

struct EndlessResponseBody(Interval);

impl hyper::body::Body for EndlessResponseBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_tick(context).map(|_| Some(Ok(Frame::data(Bytes::from_static(b"more")))))
    }
}

fn start_server(connection_limits: ConnectionLimits) -> (SocketAddr, RunningApiServer) {
    let router = Router::new()
        .route("/", get(async || "here"))
        .route("/watch", get(async || Body::new(EndlessResponseBody(interval(Duration::from_millis(5))))));
    let listener = ApiListener::bind("127.0.0.1:0".parse().unwrap()).unwrap().with_connection_limits(connection_limits);
    (listener.address(), listener.serve(PlainTcpAcceptor, router, || {}, std::future::pending()).unwrap())
}

struct TestClient(TcpStream);

impl TestClient {
    async fn connect(host_number: u8, server_address: SocketAddr) -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, host_number], 0))).unwrap();
        Self(socket.connect(server_address).await.unwrap())
    }

    async fn send_text(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
    }

    async fn read_until(&mut self, expected: &str) {
        let mut received_bytes = Vec::new();
        let read_future = async {
            while !String::from_utf8_lossy(&received_bytes).contains(expected) {
                assert_ne!(self.0.read_buf(&mut received_bytes).await.unwrap(), 0, "it was let go");
            }
        };
        timeout(CONDITION_TIMEOUT, read_future).await.unwrap_or_else(|_| panic!("no {expected:?} in time"));
    }

    async fn request_root_page(&mut self) {
        self.send_text("GET / HTTP/1.1\r\nHost: h\r\n\r\n").await;
        self.read_until("here").await;
    }

    async fn start_watch(&mut self) {
        self.send_text("GET /watch HTTP/1.1\r\nHost: h\r\n\r\n").await;
        self.read_until("more").await;
    }

    async fn assert_closed(&mut self) {
        let mut received_bytes = Vec::new();
        let read_result = timeout(CONDITION_TIMEOUT, self.0.read_to_end(&mut received_bytes)).await;
        drop(read_result.expect("it is let go in time"));
    }
}

/// Checks that a new connection at the limit replaces an idle connection, and that active connections stay open.
#[tokio::test]
async fn idle_connection_is_evicted_for_a_new_one() {
    let (address, _serving) = start_server(ConnectionLimits {
        max_connections: 5,
        request_head_timeout: UNREACHED_REQUEST_HEAD_TIMEOUT,
        ..ConnectionLimits::default()
    });
    let mut lone_client_of_network = TestClient::connect(2, address).await;
    let mut watcher = TestClient::connect(1, address).await;
    watcher.start_watch().await;
    let mut recently_active_client = TestClient::connect(1, address).await;
    recently_active_client.request_root_page().await;
    let mut partial_request_client = TestClient::connect(1, address).await;
    partial_request_client.send_text("GET / HTTP/1.1\r\n").await;
    let mut longest_idle_client = TestClient::connect(1, address).await;
    // `recently_active_client` sends its second request last, so `longest_idle_client` is idle for longer.
    longest_idle_client.request_root_page().await;
    recently_active_client.request_root_page().await;

    let mut new_client = TestClient::connect(3, address).await;
    new_client.request_root_page().await;
    partial_request_client.assert_closed().await;
    let mut second_new_client = TestClient::connect(3, address).await;
    second_new_client.request_root_page().await;
    longest_idle_client.assert_closed().await;
    // The two earlier new clients share an address. The client with address 2 is idle for longer, but is alone there.
    let mut third_new_client = TestClient::connect(4, address).await;
    third_new_client.request_root_page().await;
    new_client.assert_closed().await;
    for client in
        [&mut lone_client_of_network, &mut recently_active_client, &mut second_new_client, &mut third_new_client]
    {
        client.request_root_page().await;
    }
    watcher.read_until("more").await;
}

#[tokio::test]
async fn new_connection_waits_while_all_slots_are_busy() {
    let (address, _serving) = start_server(ConnectionLimits {
        max_connections: 2,
        request_head_timeout: UNREACHED_REQUEST_HEAD_TIMEOUT,
        ..ConnectionLimits::default()
    });
    let mut watchers = [TestClient::connect(1, address).await, TestClient::connect(1, address).await];
    for watcher in &mut watchers {
        watcher.start_watch().await;
    }
    let mut waiting_client = TestClient::connect(1, address).await;
    let early_answer_result = timeout(Duration::from_millis(300), waiting_client.request_root_page()).await;
    assert!(early_answer_result.is_err(), "there is no place");
    let [first, mut second] = watchers;
    drop(first);
    waiting_client.read_until("here").await;
    second.read_until("more").await;
}

#[tokio::test]
async fn idle_connection_is_closed_unless_it_receives_a_stream() {
    let (address, _serving) =
        start_server(ConnectionLimits { request_head_timeout: Duration::from_secs(2), ..ConnectionLimits::default() });
    let mut watcher = TestClient::connect(1, address).await;
    watcher.start_watch().await;
    let mut silent_client = TestClient::connect(1, address).await;
    let mut partial_request_client = TestClient::connect(1, address).await;
    partial_request_client.send_text("GET / HTTP/1.1\r\n").await;
    let mut idle_client = TestClient::connect(1, address).await;
    idle_client.request_root_page().await;
    for client in [&mut silent_client, &mut partial_request_client, &mut idle_client] {
        client.assert_closed().await;
    }
    for _ in 0..3 {
        watcher.read_until("more").await;
    }
}
