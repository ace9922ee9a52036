//! No request keeps another one or a table waiting: the worst of each kind that may be sent, at the largest size that is documented,
//! before a fleet as large as there may be one. Measured as CPU time of what all others share, the API's thread and the
//! controller's lock, so that a busy machine changes nothing.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use coreward_api::Role;
use coreward_api::endpoints::{DOCUMENT_BODY, SMALL_BODY};
use coreward_api::serve::{Listener, Plain};
use coreward_api::tokens::{Tokens, token_file};
use coreward_api::types::MAX_EXPLAINED;
use coreward_model::ServerId;
use coreward_wire::ServiceIndex;
use reqwest::{Client, Method};
use serde_json::{Value, json};

use super::PACKETS_BODY;
use crate::config::ControllerConfig;
use crate::controller::Controller;
use crate::server::keeper::Keeper;
use crate::server::make;
use crate::server::office::Office;
use crate::server::security::Security;
use crate::server::shared::{Shared, WantedChange};
use crate::store::Store;
use crate::store::embedded::EmbeddedStore;

/// That others may be kept waiting.
const LONGEST: Duration = Duration::from_millis(20);
/// Services that have every server; the others have a few.
const LARGE_SERVICES: usize = 8;

/// As large as a fleet can be. `more`: something that makes it another one.
fn fleet(more: &str) -> String {
    let mut text = more.to_owned();
    for n in 0..ServerId::COUNT {
        let [high, low] = (n as u16).to_be_bytes();
        text += &format!("[[server]]\nname = \"server-{n}\"\naddress = \"10.2.{high}.{low}\"\n");
    }
    for n in 0..ServiceIndex::COUNT {
        let [high, low] = (n as u16).to_be_bytes();
        text += &format!("[[service]]\nname = \"service-{n}\"\nvip = \"10.200.{high}.{low}:80\"\n");
        if n >= LARGE_SERVICES {
            let first = n * 8 % ServerId::COUNT;
            text += &format!("servers = [\"server-{first}\", \"server-{}\"]\n", first + 1);
        }
    }
    text
}

struct Site {
    address: SocketAddr,
    shared: Arc<Shared>,
    client: Client,
    tokens: [String; 2],
}

impl Site {
    async fn request(&self, (method, path, role, body): &Request) -> (u16, usize) {
        let token = &self.tokens[usize::from(*role == Role::Operator)];
        let url = format!("http://{}{path}", self.address);
        let request = self.client.request(method.clone(), url).bearer_auth(token);
        let request = request.header("content-type", "application/json").body(body.clone());
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.bytes().await.unwrap().len())
    }
}

type Request = (Method, String, Role, String);

/// A controller that leads the largest fleet, and its API.
fn with_site(directory: &Path, test: impl AsyncFnOnce(&Site)) {
    let (path, store) = (directory.join("controller.toml"), directory.join("store"));
    std::fs::write(&path, format!("listen = \"127.0.0.1:0\"\nstore = {store:?}\n")).unwrap();
    let config = ControllerConfig::load(&path).unwrap();
    let office = Office::new(None, Security::of(&config.door()).unwrap());
    let open = || Ok(Store::Embedded(EmbeddedStore::open(&store)?));
    let mut keeper = Keeper::open(&path, config, office.security.denied.clone(), open).unwrap();
    let (shared, mut changes) = Shared::new(Controller::new(keeper.fleet()), (keeper.clock(), keeper.counts()), None);
    let shared = Arc::new(shared);
    shared.settle();
    office.take(shared.clone());
    let drawn = Arc::new(Tokens::open(directory).unwrap());
    let listener = Listener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let address = listener.address();
    let token = |role| std::fs::read_to_string(token_file(directory, role)).unwrap().trim().to_owned();
    let tokens = [Role::Viewer, Role::Operator].map(token);
    let client = Client::builder().no_proxy().build().unwrap();
    let site = Site { address, shared: shared.clone(), client, tokens };
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(async {
        let hangup = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup()).unwrap();
        let _serving = super::serve(listener, Plain, Arc::new(office), drawn, hangup).unwrap();
        let keep = async {
            while let Some(WantedChange { change, author, done }) = changes.recv().await {
                let (back, outcome) = make(keeper, &shared, change, author).await.unwrap();
                keeper = back;
                let _ = done.send(outcome);
            }
        };
        tokio::select! {
            () = keep => {}
            () = test(&site) => {}
        }
    });
}

fn document(text: &str) -> String {
    json!({ "name": "fleet.toml", "text": text }).to_string()
}

fn filled(unit: &str) -> String {
    let bytes = json!(unit).to_string().len() - 2;
    document(&unit.repeat((DOCUMENT_BODY - 100) / bytes))
}

fn packets(first: usize) -> String {
    let packet = |n: usize| {
        let service = (first + n) % ServiceIndex::COUNT;
        json!({
            "source_address": format!("192.0.2.{}", n % 250), "source_port": 1024 + n,
            "destination_address": format!("10.200.{}.{}", service >> 8, service & 255), "destination_port": 80,
            "protocol": "tcp", "packet": "first",
        })
    };
    json!({ "packets": (0..MAX_EXPLAINED).map(packet).collect::<Vec<Value>>() }).to_string()
}

fn one_service(packets: &str) -> String {
    let mut value: Value = serde_json::from_str(packets).unwrap();
    for packet in value["packets"].as_array_mut().unwrap() {
        packet["destination_address"] = json!("10.200.0.0");
    }
    value.to_string()
}

/// The worst of each kind.
fn worst() -> Vec<Request> {
    let fleet = fleet("");
    let check = |text| (Method::POST, "/v1/check".to_owned(), Role::Viewer, text);
    let mut requests: Vec<Request> = [
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
    ]
    .into_iter()
    .map(|unit| check(filled(unit)))
    .collect();
    let unknown: String = (0..300_000).map(|n| format!("\"server-{n}x\",")).collect();
    requests.push(check(document(&format!("{fleet}[[service]]\nname=\"x\"\nservers=[{unknown}]\n"))));
    requests.push(check(document(&format!("{fleet}[[service]]\nname=\"x\"\nservers=[\"{}\"]\n", "s".repeat(4 << 20)))));
    requests.push(check(document(&fleet)));
    requests.push(check("[".repeat(DOCUMENT_BODY)));
    requests.push((Method::POST, "/v1/explain/packets".to_owned(), Role::Viewer, packets(0)));
    requests.push((Method::POST, "/v1/explain/packets".to_owned(), Role::Viewer, one_service(&packets(0))));
    requests.push((Method::POST, "/v1/explain/packets".to_owned(), Role::Viewer, "[".repeat(PACKETS_BODY)));
    requests.push((Method::POST, "/v1/keys/rotate".to_owned(), Role::Operator, "[".repeat(SMALL_BODY)));
    for path in [
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
    ] {
        requests.push((Method::GET, format!("/v1/{path}"), Role::Operator, String::new()));
    }
    requests
}

/// CPU time of this process' thread that moves the API's bytes.
fn api_thread_time() -> Duration {
    let threads = std::fs::read_dir("/proc/self/task").unwrap().map(|entry| entry.unwrap().path());
    let named =
        |path: &std::path::PathBuf| std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name == "api\n");
    let nanoseconds = |path: std::path::PathBuf| {
        let text = std::fs::read_to_string(path.join("schedstat")).unwrap();
        text.split(' ').next().unwrap().parse::<u64>().unwrap()
    };
    Duration::from_nanos(threads.filter(named).map(nanoseconds).sum())
}

#[test]
fn the_largest_request_keeps_nobody_waiting() {
    let directory = tempfile::tempdir().unwrap();
    with_site(directory.path(), async |site| {
        let put = json!({ "name": "fleet.toml", "text": fleet(""), "generation": 0, "dry_run": false }).to_string();
        let (status, _) = site.request(&(Method::PUT, "/v1/fleet".to_owned(), Role::Operator, put)).await;
        assert_eq!(status, 200);
        let held = || Duration::from_nanos(site.shared.held_longest.swap(0, Ordering::Relaxed));
        let configuring = held();
        assert!(configuring < LONGEST, "a new document: {configuring:?}");
        // Policies take what they take; that is no request.
        site.shared.make_due_tables(Duration::from_secs(3600));
        held();
        for request in worst() {
            held();
            let before = api_thread_time();
            let (status, bytes) = site.request(&request).await;
            let (thread, held) = (api_thread_time() - before, held());
            let (method, path, _, body) = &request;
            let beginning: String = body.chars().take(60).collect();
            let what = format!("{method} {path} {beginning}: {status}, {bytes} bytes, API {thread:?}, lock {held:?}");
            eprintln!("{what}");
            assert!(status == 200 || status == 400 || status == 405, "{what}");
            assert!(thread < LONGEST && held < LONGEST, "{what}");
        }
    });
}
