//! HTTP endpoint `GET /metrics`, from which Prometheus scrapes a daemon's metrics.

use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::{Semaphore, mpsc, oneshot};

use coreward_metrics::snapshot::MetricsSnapshot;

/// Media type of OpenMetrics 1.0, which is the format that prometheus-client writes.
const OPENMETRICS_MEDIA_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Maximum number of concurrent connections. Further connections wait.
const MAX_SCRAPE_CONNECTIONS: usize = 8;
/// Time limit for a connection, from its acceptance to the end of the answer.
const SCRAPE_CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
const MAX_SCRAPE_HEADER_BYTES: usize = 16 << 10;

/// Receiver of scrapes (metrics requests) from Prometheus. The daemon answers each with a snapshot of its metrics.
#[derive(Debug, Default)]
pub struct MetricsScrapeReceiver(Option<mpsc::Receiver<oneshot::Sender<MetricsSnapshot>>>);

impl MetricsScrapeReceiver {
    /// Listens for scrapes at `address`. With `None`, no scrapes arrive.
    pub fn listen(address: Option<SocketAddr>) -> anyhow::Result<Self> {
        let Some(address) = address else { return Ok(Self(None)) };
        let listener = bind_listener(address)?;
        let (scrape_sender, scrape_receiver) = mpsc::channel(1);
        let request_snapshot = move || {
            let scrape_sender = scrape_sender.clone();
            async move {
                let (sender, page) = oneshot::channel();
                scrape_sender.send(sender).await.ok()?;
                page.await.ok()
            }
        };
        start_server_thread(listener, || (), request_snapshot)?;
        Ok(Self(Some(scrape_receiver)))
    }

    /// Waits for the next scrape, and returns the sender for its answer. Cancel-safe.
    pub async fn receive_scrape(&mut self) -> oneshot::Sender<MetricsSnapshot> {
        match &mut self.0 {
            Some(scrape_receiver) => match scrape_receiver.recv().await {
                Some(scrape) => scrape,
                None => std::future::pending().await,
            },
            None => std::future::pending().await,
        }
    }
}

/// Answers each scrape with the result of `collect`. Runs in a new thread, which first calls `on_thread_start`. Does
/// nothing if `address` is `None`.
pub fn serve_metrics(
    address: Option<SocketAddr>,
    on_thread_start: impl FnOnce() + Send + 'static,
    collect: impl Fn() -> MetricsSnapshot + Clone + Send + 'static,
) -> anyhow::Result<()> {
    let Some(address) = address else { return Ok(()) };
    start_server_thread(bind_listener(address)?, on_thread_start, move || std::future::ready(Some(collect())))
}

fn bind_listener(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let expected_address = "expected a free port and an address of this host (`metrics`)";
    let listener =
        TcpListener::bind(address).with_context(|| format!("cannot listen on {address}: {expected_address}"))?;
    listener.set_nonblocking(true)?;
    tracing::info!(
        event = "metrics-served",
        address = %listener.local_addr()?,
        "the daemon serves its metrics at /metrics"
    );
    Ok(listener)
}

fn start_server_thread<F: Future<Output = Option<MetricsSnapshot>> + 'static>(
    listener: TcpListener,
    on_thread_start: impl FnOnce() + Send + 'static,
    collect: impl Fn() -> F + Clone + Send + 'static,
) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let address = listener.local_addr()?;
    let run_server = move || {
        on_thread_start();
        let local_set = tokio::task::LocalSet::new();
        local_set.block_on(&runtime, async move {
            match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => accept_connections(listener, address, collect).await,
                Err(error) => tracing::error!(
                    event = "metrics-failed",
                    %address,
                    %error,
                    "the daemon cannot serve its metrics: restart the daemon"
                ),
            }
        });
    };
    std::thread::Builder::new().name("metrics".to_owned()).spawn(run_server)?;
    Ok(())
}

async fn accept_connections<F: Future<Output = Option<MetricsSnapshot>> + 'static>(
    listener: tokio::net::TcpListener,
    address: SocketAddr,
    collect: impl Fn() -> F + Clone + 'static,
) {
    let connection_slots = Arc::new(Semaphore::new(MAX_SCRAPE_CONNECTIONS));
    loop {
        let Ok(connection_slot) = connection_slots.clone().acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // There may be too many open files, for example. The pause gives other connections time to end.
                tracing::warn!(
                    event = "accept-failed",
                    %address,
                    %error,
                    "the daemon cannot accept a connection for metrics and retries in 100 ms"
                );
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let collect = collect.clone();
        tokio::task::spawn_local(async move {
            let service = service_fn(move |request| handle_request(request, collect.clone()));
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(SCRAPE_CONNECTION_TIMEOUT)
                .max_buf_size(MAX_SCRAPE_HEADER_BYTES)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            // The timeout disconnects clients that are slow or use another protocol.
            let _ = tokio::time::timeout(SCRAPE_CONNECTION_TIMEOUT, connection).await;
            drop(connection_slot);
        });
    }
}

async fn handle_request<F: Future<Output = Option<MetricsSnapshot>>>(
    request: Request<Incoming>,
    collect: impl Fn() -> F,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let mut response = Response::new(Full::default());
    if request.uri().path() != "/metrics" {
        *response.status_mut() = StatusCode::NOT_FOUND;
        *response.body_mut() = Full::from("expected /metrics\n");
    } else if request.method() != Method::GET {
        *response.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
        response.headers_mut().insert(ALLOW, "GET".parse().expect("a header's value"));
    } else if let Some(page) = collect().await {
        response.headers_mut().insert(CONTENT_TYPE, OPENMETRICS_MEDIA_TYPE.parse().expect("a header's value"));
        *response.body_mut() = Full::from(page.to_openmetrics());
    } else {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    Ok(response)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;

    use coreward_metrics::message_metrics::CONFIGURATION_GENERATION;

    use super::*;

    fn send_request(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    }

    #[test]
    fn endpoint_serves_metrics_only_for_get_and_one_path() {
        let listener = bind_listener("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        assert!(bind_listener(address).unwrap_err().to_string().contains("expected a free port"));
        let collect_snapshot = || {
            let mut snapshot = MetricsSnapshot::default();
            snapshot.add_value(&CONFIGURATION_GENERATION, [], 7.0);
            std::future::ready(Some(snapshot))
        };
        start_server_thread(listener, || (), collect_snapshot).unwrap();
        let request_path =
            |path: &str, method: &str| send_request(address, &format!("{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n"));
        let response = request_path("/metrics", "GET");
        assert!(
            response.starts_with("HTTP/1.1 200 OK") && response.contains("content-type: application/openmetrics-text")
        );
        assert!(
            response.contains("\ncoreward_configuration_generation 7.0\n") && response.ends_with("# EOF\n"),
            "{response}"
        );
        assert!(request_path("/", "GET").starts_with("HTTP/1.1 404"));
        assert!(request_path("/metrics", "POST").starts_with("HTTP/1.1 405"));
        assert!(send_request(address, "nonsense\r\n\r\n").starts_with("HTTP/1.1 400"));
    }
}
