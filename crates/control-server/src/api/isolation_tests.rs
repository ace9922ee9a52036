//! Tests that no request delays another one or a table. The worst permitted request of each kind, at the largest
//! documented size, runs against the largest fleet. The test measures the longest CPU time of the API's thread without
//! a yield, and the longest wait for the controller's lock. It needs the machine for itself.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use coreward_api::Role;
use coreward_http::endpoints::{DEFAULT_MAX_REQUEST_BODY_BYTES, MAX_FLEET_DOCUMENT_BYTES};
use coreward_http::serve::{ApiListener, PlainTcpAcceptor};
use coreward_http::tokens::{ApiTokens, token_file_path};
use coreward_model::ServerId;
use coreward_wire::ServiceIndex;
use nix::time::{ClockId, clock_gettime};
use reqwest::{Client, Method};
use serde_json::json;
use tokio::sync::mpsc;

use super::{build_router, update_watchers_loop};
use crate::config::ControllerConfig;
use crate::server::apply_record_change;
use crate::server::controller_state::{ControllerState, FleetRecordChangeRequest};
use crate::server::leader_election::LeaderElection;
use crate::server::state_manager::FleetStateManager;
use coreward_controller::Controller;
use coreward_listener::security::ListenerSecurity;
use coreward_store::FleetStore;
use coreward_store::embedded::EmbeddedStore;

/// Maximum delay that one large request may cause for other requests and for placement tables.
const MAX_DELAY_BY_LARGE_REQUEST: Duration = Duration::from_millis(20);
/// Number of services that use every server. The other services use only a few servers.
const SERVICES_WITH_ALL_SERVERS: usize = 8;

/// Returns the fleet document of the largest fleet. `additional_line` makes the texts of several calls different.
fn largest_fleet_text(additional_line: &str) -> String {
    let mut text = additional_line.to_owned();
    for n in 0..ServerId::COUNT {
        let [high, low] = (n as u16).to_be_bytes();
        text += &format!("[[server]]\nname = \"server-{n}\"\naddress = \"10.2.{high}.{low}\"\n");
    }
    for n in 0..ServiceIndex::COUNT {
        let [high, low] = (n as u16).to_be_bytes();
        text += &format!("[[service]]\nname = \"service-{n}\"\nvip = \"10.200.{high}.{low}:80\"\n");
        if n >= SERVICES_WITH_ALL_SERVERS {
            let first_server = n * 8 % ServerId::COUNT;
            text += &format!("servers = [\"server-{first_server}\", \"server-{}\"]\n", first_server + 1);
        }
    }
    text
}

struct IsolationTestEnv {
    address: SocketAddr,
    state: Arc<ControllerState>,
    client: Client,
    viewer_and_operator_tokens: [String; 2],
    api_thread_busy_time: Arc<ApiThreadBusyTime>,
    /// Longest wait for the controller's lock since the last [`IsolationTestEnv::take_longest_lock_wait`] (ns).
    longest_lock_wait_ns: Arc<AtomicU64>,
}

/// Calls `lock` several times per millisecond until it returns `None`, and records the longest wait. A wait counts as
/// the smaller of its wall-clock and CPU time, because wall-clock time includes a hypervisor's pauses and CPU time
/// includes other threads.
fn measure_lock_waits(lock: impl Fn() -> Option<()>, longest_wait: Arc<AtomicU64>) {
    let read_process_cpu_time = || Duration::from(clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).unwrap());
    loop {
        let (start_time, start_cpu_time) = (Instant::now(), read_process_cpu_time());
        if lock().is_none() {
            return;
        }
        let wait_time = start_time.elapsed().min(read_process_cpu_time() - start_cpu_time);
        longest_wait.fetch_max(wait_time.as_nanos() as u64, Ordering::Relaxed);
        std::thread::sleep(Duration::from_micros(200));
    }
}

#[derive(Default)]
struct ApiThreadBusyTime {
    /// Longest CPU time of the API's thread without a yield (ns).
    longest_busy_ns: AtomicU64,
    measurement_count: AtomicU64,
}

impl ApiThreadBusyTime {
    /// Returns the longest CPU time that the API's thread used without a yield since the last call, including the
    /// present period.
    async fn take_longest_busy_time(&self) -> Duration {
        let initial_measurement_count = self.measurement_count.load(Ordering::Relaxed);
        while self.measurement_count.load(Ordering::Relaxed) < initial_measurement_count + 2 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Duration::from_nanos(self.longest_busy_ns.swap(0, Ordering::Relaxed))
    }
}

/// Repeatedly measures the CPU time between two yields of the API's thread. Other requests must wait for the next
/// yield.
async fn measure_thread_busy_time(api_thread: Arc<ApiThreadBusyTime>) {
    let read_thread_cpu_ns =
        || Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap()).as_nanos() as u64;
    let mut previous_cpu_time = read_thread_cpu_ns();
    loop {
        // This pause is shorter than a significant poll, but long enough that the thread rests.
        tokio::time::sleep(Duration::from_millis(1)).await;
        let current_cpu_time = read_thread_cpu_ns();
        api_thread.longest_busy_ns.fetch_max(current_cpu_time - previous_cpu_time, Ordering::Relaxed);
        api_thread.measurement_count.fetch_add(1, Ordering::Relaxed);
        previous_cpu_time = current_cpu_time;
    }
}

impl IsolationTestEnv {
    async fn send_request(&self, (method, path, role, body): &TestRequest) -> (u16, usize) {
        let token = &self.viewer_and_operator_tokens[usize::from(*role == Role::Operator)];
        let url = format!("http://{}{path}", self.address);
        let request = self.client.request(method.clone(), url).bearer_auth(token);
        let request = request.header("content-type", "application/json").body(body.clone());
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.bytes().await.unwrap().len())
    }

    /// Sends the request. Returns a description of the response, and the longest times for which other work waited for
    /// the API's thread and for the controller's lock.
    async fn measure_request_delays(&self, request: &TestRequest) -> (String, Duration, Duration) {
        self.take_longest_lock_wait();
        self.api_thread_busy_time.take_longest_busy_time().await;
        let (status, bytes) = self.send_request(request).await;
        let (thread_delay, lock_delay) =
            (self.api_thread_busy_time.take_longest_busy_time().await, self.take_longest_lock_wait());
        let (method, path, _, body) = request;
        let body_prefix: String = body.chars().take(60).collect();
        let request_summary = format!(
            "{method} {path} {body_prefix}: {status}, {bytes} bytes, API {thread_delay:?}, lock {lock_delay:?}"
        );
        assert!(status == 200 || status == 400 || status == 405, "{request_summary}");
        (request_summary, thread_delay, lock_delay)
    }

    fn take_longest_lock_wait(&self) -> Duration {
        Duration::from_nanos(self.longest_lock_wait_ns.swap(0, Ordering::Relaxed))
    }
}

type TestRequest = (Method, String, Role, String);

async fn apply_requested_changes(
    mut manager: FleetStateManager,
    state: &ControllerState,
    mut changes: tokio::sync::mpsc::Receiver<FleetRecordChangeRequest>,
) {
    while let Some(FleetRecordChangeRequest { change, author, reply_sender }) = changes.recv().await {
        let (returned_manager, outcome) = apply_record_change(manager, state, change, author).await.unwrap();
        manager = returned_manager;
        let _ = reply_sender.send(outcome);
    }
}

/// Opens a controller with its files in `directory`. It leads only after [`LeaderElection::become_leader`] is called
/// with the returned state.
pub(super) fn open_controller_parts(
    directory: &Path,
) -> (LeaderElection, FleetStateManager, ControllerState, mpsc::Receiver<FleetRecordChangeRequest>) {
    let (path, store) = (directory.join("controller.toml"), directory.join("store"));
    std::fs::write(&path, format!("listen = \"127.0.0.1:0\"\nstore = {store:?}\n")).unwrap();
    let config = ControllerConfig::load(&path).unwrap();
    let election = LeaderElection::new(None, ListenerSecurity::from_config(&config.listener_config()).unwrap());
    let open_store = || Ok(FleetStore::Embedded(EmbeddedStore::open(&store)?));
    let manager =
        FleetStateManager::open(&path, config, election.security.revocation_list.clone(), open_store).unwrap();
    let (state, changes) = ControllerState::new(
        Controller::new(manager.fleet()),
        (manager.record_clock(), manager.state_counters()),
        None,
    );
    (election, manager, state, changes)
}

/// Runs the test with a controller that leads the largest fleet, and with its API.
fn run_with_env(directory: &Path, test: impl AsyncFnOnce(&IsolationTestEnv)) {
    let (election, manager, state, changes) = open_controller_parts(directory);
    let state = Arc::new(state);
    state.allow_tables();
    election.become_leader(state.clone());
    let api_tokens = Arc::new(ApiTokens::open(directory).unwrap());
    let listener = ApiListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let address = listener.address();
    let read_token = |role| std::fs::read_to_string(token_file_path(directory, role)).unwrap().trim().to_owned();
    let tokens = [Role::Viewer, Role::Operator].map(read_token);
    let client = Client::builder().no_proxy().build().unwrap();
    let (api_thread, longest_wait_ns) = (Arc::default(), Arc::<AtomicU64>::default());
    let (weak_state, lock_wait_ns) = (Arc::downgrade(&state), longest_wait_ns.clone());
    std::thread::spawn(move || {
        measure_lock_waits(|| weak_state.upgrade().map(|state| drop(state.lock_controller())), lock_wait_ns)
    });
    let env = IsolationTestEnv {
        address,
        state: state.clone(),
        client,
        viewer_and_operator_tokens: tokens,
        api_thread_busy_time: api_thread,
        longest_lock_wait_ns: longest_wait_ns,
    };
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(async {
        let (router, api) = build_router(Arc::new(election), api_tokens).unwrap();
        let busy_time_measurement = measure_thread_busy_time(env.api_thread_busy_time.clone());
        let background_tasks = async {
            tokio::join!(update_watchers_loop(api), busy_time_measurement);
        };
        let _serving = listener.serve(PlainTcpAcceptor, router, || (), background_tasks).unwrap();
        tokio::select! {
            () = apply_requested_changes(manager, &state, changes) => {}
            () = test(&env) => {}
        }
    });
}

fn build_check_request_json(text: &str) -> String {
    json!({ "name": "fleet.toml", "text": text }).to_string()
}

fn largest_check_request_json(server_json: &str) -> String {
    let json_byte_count = json!(server_json).to_string().len() - 2;
    build_check_request_json(&server_json.repeat((MAX_FLEET_DOCUMENT_BYTES - 100) / json_byte_count))
}

/// Texts, each of which a test repeats to fill a fleet document of the maximum size.
const REPEATED_DOCUMENT_TOML_TEXTS: [&str; 15] = [
    "=\n",
    "a=1\n",
    "[a]\n",
    "[[a]]\n",
    "[[server]]\n",
    "[[service]]\nservers=[\"\"]\n",
    "a.",
    "[",
    "\"",
    "= ",
    "\r",
    "a={",
    "[[service]]\n",
    "alpha=7\n",
    "'''",
];
/// Paths below `/v1/` whose GET requests change nothing.
const READ_ONLY_API_PATHS: [&str; 17] = [
    "status?rss_keys=true",
    "services",
    "services/service-0",
    "servers",
    "servers/server-1",
    "load-balancers",
    "loads",
    "tables",
    "tables/service-0",
    "keys",
    "fleet",
    "events",
    "openapi.json",
    "health",
    "version",
    "explain?vip=10.200.0.0:80&client=192.0.2.1:1024",
    "servers/server-1/drain",
];

fn largest_requests() -> Vec<TestRequest> {
    let fleet_text = largest_fleet_text("");
    let build_check_request = |text| (Method::POST, "/v1/check".to_owned(), Role::Viewer, text);
    let mut requests: Vec<TestRequest> = REPEATED_DOCUMENT_TOML_TEXTS
        .into_iter()
        .map(|unit| build_check_request(largest_check_request_json(unit)))
        .collect();
    let unknown_servers: String = (0..300_000).map(|n| format!("\"server-{n}x\",")).collect();
    requests.push(build_check_request(build_check_request_json(&format!(
        "{fleet_text}[[service]]\nname=\"x\"\nservers=[{unknown_servers}]\n"
    ))));
    requests.push(build_check_request(build_check_request_json(&format!(
        "{fleet_text}[[service]]\nname=\"x\"\nservers=[\"{}\"]\n",
        "s".repeat(4 << 20)
    ))));
    requests.push(build_check_request(build_check_request_json(&fleet_text)));
    requests.push(build_check_request("[".repeat(MAX_FLEET_DOCUMENT_BYTES)));
    requests.push((
        Method::POST,
        "/v1/keys/rotate".to_owned(),
        Role::Operator,
        "[".repeat(DEFAULT_MAX_REQUEST_BODY_BYTES),
    ));
    for path in READ_ONLY_API_PATHS {
        requests.push((Method::GET, format!("/v1/{path}"), Role::Operator, String::new()));
    }
    requests
}

/// Maximum number of attempts of each request. A hypervisor's pause may count as CPU time in some attempts, but not in
/// every one.
const MAX_REQUEST_ATTEMPTS: u64 = 5;

async fn assert_request_causes_no_delay(env: &IsolationTestEnv, request: impl Fn(u64) -> TestRequest) {
    let mut request_summary = String::new();
    for attempt in 0..MAX_REQUEST_ATTEMPTS {
        let (thread_delay, lock_delay);
        let request = request(attempt);
        (request_summary, thread_delay, lock_delay) = env.measure_request_delays(&request).await;
        // A check takes no lock, so the time for parsing must not count as a wait for it.
        let takes_lock = request.1 != "/v1/check";
        if thread_delay < MAX_DELAY_BY_LARGE_REQUEST && (lock_delay < MAX_DELAY_BY_LARGE_REQUEST || !takes_lock) {
            return eprintln!("{request_summary}");
        }
    }
    panic!("{MAX_REQUEST_ATTEMPTS} times at least {MAX_DELAY_BY_LARGE_REQUEST:?}; the last: {request_summary}");
}

#[test]
fn largest_request_delays_no_other_request_or_table() {
    let directory = tempfile::tempdir().unwrap();
    run_with_env(directory.path(), async |env| {
        assert_request_causes_no_delay(env, |attempt| {
            let fleet_text = largest_fleet_text(&format!("# {attempt}\n"));
            let request_body =
                json!({ "name": "fleet.toml", "text": fleet_text, "generation": attempt, "dry_run": false });
            (Method::PUT, "/v1/fleet".to_owned(), Role::Operator, request_body.to_string())
        })
        .await;
        // Policies run before the measurement, because they do not belong to any request.
        env.state.make_due_tables(Duration::from_secs(3600));
        for request in largest_requests() {
            assert_request_causes_no_delay(env, |_| request.clone()).await;
        }
    });
}
