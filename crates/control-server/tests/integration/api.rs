//! Tests of the HTTP API over loopback, with a controller in this process.

use std::collections::BTreeSet;
use std::path::PathBuf;

use coreward_api::Role;
use coreward_api::types::{CheckRequest, DrainOrigin, DrainServer, NewFleet, ServerState};
use coreward_http::client::ControllerClient;
use coreward_http::tokens::token_file_path;
use coreward_http::{Problem, ProblemKind};
use reqwest::{Method, StatusCode};
use serde_json::Value;

use crate::support::{RunningController, TestDirectory, with_timeout};

const WEB_SERVICE_TOML: &str = "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\npolicy = \"crossrss\"\n";

/// Operations other than GET that a viewer may request, because they do not change the fleet.
const VIEWER_API_OPERATIONS: [&str; 3] = ["POST /v1/check", "POST /v1/session", "DELETE /v1/session"];

struct ApiTestEnv {
    test_directory: TestDirectory,
    controller: RunningController,
    http_client: reqwest::Client,
}

impl ApiTestEnv {
    async fn start(test_directory: TestDirectory) -> Self {
        let controller = test_directory.start_controller().await;
        Self { test_directory, controller, http_client: reqwest::Client::builder().no_proxy().build().unwrap() }
    }

    fn token_file_path(&self, role: Role) -> PathBuf {
        token_file_path(self.test_directory.temporary_directory.path(), role)
    }

    fn client_with_role(&self, role: Role) -> ControllerClient {
        ControllerClient::new(self.controller.api_address.into(), &self.token_file_path(role)).unwrap()
    }

    fn read_token(&self, role: Role) -> String {
        std::fs::read_to_string(self.token_file_path(role)).unwrap().trim().to_owned()
    }

    /// Sends a request, and repeats it while the API rejects it because of the limit of rejected requests.
    async fn send_request_within_limit(&self, method: &str, path: &str, token: Option<&str>) -> (StatusCode, Value) {
        loop {
            // The body does not matter, because it is not read.
            let (status, problem) = self.send_request(method, path, token, Some("{}")).await;
            if status != StatusCode::TOO_MANY_REQUESTS {
                return (status, problem);
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    }

    async fn send_request(
        &self,
        method: &str,
        path: &str,
        token: Option<&str>,
        body: Option<&str>,
    ) -> (StatusCode, Value) {
        let url = format!("http://{}{path}", self.controller.api_address);
        let mut request = self.http_client.request(Method::from_bytes(method.as_bytes()).unwrap(), url);
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body.to_owned());
        }
        let response = with_timeout("an answer", request.send()).await.unwrap();
        let status = response.status();
        if !status.is_success() {
            assert_eq!(response.headers()["content-type"], "application/problem+json", "{method} {path}: {status}");
            let problem: Problem = response.json().await.unwrap();
            assert_eq!(problem.status, status.as_u16());
            return (status, serde_json::to_value(problem).unwrap());
        }
        (status, serde_json::from_slice(&response.bytes().await.unwrap()).unwrap_or_default())
    }
}

/// Returns the method, the path and the required role of each operation in the OpenAPI document.
fn documented_operations(document: &Value) -> Vec<(String, String, Role)> {
    let mut operations = Vec::new();
    for (path, path_item) in document["paths"].as_object().unwrap() {
        for (method, operation) in path_item.as_object().unwrap() {
            let security = operation["security"].as_array().unwrap();
            assert_eq!(security.len(), 1, "{method} {path}: one way in");
            let roles = security[0]["token"].as_array().unwrap();
            assert_eq!(roles.len(), 1);
            let role = serde_json::from_value(roles[0].clone()).unwrap();
            operations.push((method.to_uppercase(), path.clone(), role));
        }
    }
    operations
}

/// Asserts that every operation of the OpenAPI document requires a token, and that a viewer's token changes nothing.
#[tokio::test]
async fn every_endpoint_requires_authentication() {
    let env = ApiTestEnv::start(TestDirectory::new(&["s1"], WEB_SERVICE_TOML)).await;
    let (viewer, operator) = (env.read_token(Role::Viewer), env.read_token(Role::Operator));
    let (_, document) = env.send_request("GET", "/v1/openapi.json", Some(&viewer), None).await;
    assert_eq!(document["openapi"], "3.1.0");
    let operations = documented_operations(&document);
    assert!(operations.len() >= 20, "{operations:?}");
    let mut requested_post_paths = BTreeSet::new();
    for (method, path, role) in &operations {
        let path = path.replace("{service}", "web").replace("{server}", "s1").replace("{load_balancer}", "lb1");
        let path = path.replace("{generation}", "1");
        assert!(!path.contains('{'), "{path}: expected a value for it here");
        for token in [None, Some("nonsense"), Some(""), Some(&operator[1..])] {
            let (status, problem) = env.send_request_within_limit(method, &path, token).await;
            assert_eq!(status, StatusCode::UNAUTHORIZED, "{method} {path} with {token:?}");
            assert_eq!(problem["type"], "urn:coreward:problem:unauthenticated");
        }
        match role {
            Role::Operator => {
                let (status, problem) = env.send_request(method, &path, Some(&viewer), Some("{}")).await;
                assert_eq!(status, StatusCode::FORBIDDEN, "{method} {path}: {problem}");
            }
            Role::Viewer if method != "GET" => {
                requested_post_paths.insert(format!("{method} {path}"));
            }
            Role::Viewer => {}
        }
    }
    assert_eq!(requested_post_paths, VIEWER_API_OPERATIONS.map(str::to_owned).into());
    let (status, _) = env.send_request("GET", "/v1/status?rss_keys=true", Some(&viewer), None).await;
    assert_eq!(status, StatusCode::FORBIDDEN);
    let (status, _) = env.send_request("GET", "/v1/status?rss_keys=true", Some(&operator), None).await;
    assert_eq!(status, StatusCode::OK);
}

#[tokio::test]
async fn invalid_request_is_answered_with_problem_json() {
    let env = ApiTestEnv::start(TestDirectory::new(&["s1"], WEB_SERVICE_TOML)).await;
    let token = env.read_token(Role::Operator);
    let too_large_body = format!("{{\"force\": \"{}\"}}", "x".repeat(100_000));
    for (method, path, body, status, expected_detail) in [
        ("GET", "/v1/nothing", None, 404, "does not exist"),
        ("GET", "/v1/services/webb", None, 404, "service \"webb\" does not exist"),
        ("GET", "/v1/status?rss_keys=perhaps", None, 400, "rss_keys"),
        ("GET", "/v1/status?colour=red", None, 400, "colour"),
        ("DELETE", "/v1/fleet", None, 405, "Allow"),
        ("GET", "/v1/explain?vip=10.200.0.9:80&client=10.1.0.1:1", None, 404, "expected one of 10.200.0.1:80/tcp"),
        ("GET", "/v1/explain?vip=10.200.0.1&client=10.1.0.1:1", None, 400, "invalid socket address"),
        (
            "GET",
            "/v1/explain?vip=10.200.0.1:80&client=%5B2001:db8::7%5D:1",
            None,
            422,
            "expected a client with an IPv4 address",
        ),
        ("GET", "/v1/watch?interval_ms=1", None, 400, "expected 250 to 60000"),
        ("GET", "/v1/events?limit=0", None, 400, "`limit` of 1 to 1000"),
        ("PUT", "/v1/fleet", Some("{\"text\": \"\", \"generation\": 1.5}"), 400, "1.5: expected a whole number"),
        ("PUT", "/v1/fleet", Some("{\"text\": \"\", \"generation\": 1.0}"), 409, "SIGHUP"),
        ("POST", "/v1/keys/rotate", Some("{\"force\": 1}"), 400, "expected a boolean"),
        ("POST", "/v1/keys/rotate", Some("{"), 400, "EOF"),
        ("POST", "/v1/keys/rotate", Some("{}"), 409, "expected at least 86400 s"),
        ("POST", "/v1/keys/rotate", Some(&*too_large_body), 413, "length limit"),
        ("PUT", "/v1/fleet", Some("{\"text\": \"\", \"generation\": 1}"), 409, "SIGHUP"),
    ] {
        let (actual_status, problem) = env.send_request(method, path, Some(&token), body).await;
        assert_eq!(actual_status.as_u16(), status, "{method} {path}: {problem}");
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.contains(expected_detail), "{method} {path}: {detail}");
    }
}

#[tokio::test]
async fn document_is_applied_whole_or_not_at_all() {
    let test_directory = TestDirectory::new(&[], "");
    test_directory.write_controller_config("");
    let env = ApiTestEnv::start(test_directory).await;
    let client = env.client_with_role(Role::Operator);
    let text = format!("[[server]]\nname = \"s1\"\naddress = \"10.2.0.1\"\n{WEB_SERVICE_TOML}");
    let new_fleet_request =
        |text: &str, generation, dry_run| NewFleet { name: "a.toml".into(), text: text.into(), generation, dry_run };
    let invalid_fleet_error = client
        .apply_fleet(&new_fleet_request("load_ewma_alpha = 2\n[[server]]\nname = \"s1\"\n", 0, false))
        .await
        .unwrap_err();
    let problem = invalid_fleet_error.downcast_ref::<Problem>().unwrap();
    assert_eq!(problem.kind, ProblemKind::WrongDocument);
    let mistake_locations: Vec<_> =
        problem.mistakes.iter().map(|mistake| (mistake.line, mistake.key.as_deref())).collect();
    assert_eq!(
        mistake_locations,
        [(Some(1), Some("load_ewma_alpha")), (Some(2), Some("server.address"))],
        "{problem:?}"
    );
    let check_result = client
        .check_fleet_document(&CheckRequest { name: "a.toml".into(), text: "load_ewma_alpha = 2\n".into() })
        .await
        .unwrap();
    assert_eq!(check_result.mistakes.len(), 1);

    let preview = client.apply_fleet(&new_fleet_request(&text, 0, true)).await.unwrap();
    assert_eq!((preview.generation, preview.is_active, preview.changes.len()), (0, false, 2));
    assert_eq!(client.fleet().await.unwrap().generation, 0);
    let applied_fleet = client.apply_fleet(&new_fleet_request(&text, 0, false)).await.unwrap();
    assert_eq!((applied_fleet.generation, applied_fleet.is_active), (1, true));
    assert_eq!(applied_fleet.changes[0].subject, "server s1");
    assert_eq!(client.fleet().await.unwrap().text, text);
    let generation_conflict = client.apply_fleet(&new_fleet_request(&text, 0, false)).await.unwrap_err();
    assert_eq!(generation_conflict.downcast_ref::<Problem>().unwrap().kind, ProblemKind::Conflict);
    assert_eq!(client.status(false).await.unwrap().services[0].name, "web");
}

/// An acknowledged drain lasts through a crash and a new document, until it is undrained.
#[tokio::test]
async fn drain_lasts_until_undrain() {
    let mut env = ApiTestEnv::start(TestDirectory::new(&["s1", "s2"], WEB_SERVICE_TOML)).await;
    let path = "/v1/servers/s1/drain";
    let token = env.read_token(Role::Operator);
    for (method, path, body, status, expected_detail) in [
        ("POST", "/v1/servers/s9/drain", "{}", 404, "server \"s9\" does not exist"),
        ("DELETE", "/v1/servers/s9/drain", "", 404, "server \"s9\" does not exist"),
        ("GET", "/v1/servers/s%2F9/drain", "", 404, "server \"s/9\" does not exist"),
        ("POST", path, "{\"services\": [\"web\", \"api\"]}", 404, "not in service \"api\": expected web"),
        ("POST", path, "{\"service\": \"web\"}", 400, "unknown field `service`"),
    ] {
        let (actual_status, problem) =
            env.send_request(method, path, Some(&token), (!body.is_empty()).then_some(body)).await;
        assert_eq!(actual_status.as_u16(), status, "{method} {path}: {problem}");
        assert!(problem["detail"].as_str().unwrap().contains(expected_detail), "{method} {path}: {problem}");
    }
    let client = env.client_with_role(Role::Operator);
    let (drain_request, forced_request) =
        (DrainServer::default(), DrainServer { force: true, ..DrainServer::default() });
    let start_time = std::time::Instant::now();
    let first_drain_status = client.drain_server("s1", &drain_request).await.unwrap();
    let drain = first_drain_status.drain.clone().unwrap();
    assert_eq!(
        (first_drain_status.state, drain.origin, drain.services.len()),
        (ServerState::Draining, DrainOrigin::Command, 0)
    );
    assert_eq!(
        (first_drain_status.state_reason.as_str(), first_drain_status.remaining_connections),
        ("by `coreward drain`", None)
    );
    assert_eq!(
        first_drain_status.unknown_count_reasons,
        ["its agent, which does not report", "a load balancer: none is connected"],
        "no agent counts"
    );
    let generation = client.status(false).await.unwrap().configuration_generation;
    let repeated_drain_status = client.drain_server("s1", &drain_request).await.unwrap();
    assert_eq!(repeated_drain_status.drain.unwrap().services, drain.services);
    assert_eq!(client.status(false).await.unwrap().configuration_generation, generation, "nothing has changed");
    let last_server_error = client.drain_server("s2", &drain_request).await.unwrap_err();
    let problem = last_server_error.downcast_ref::<Problem>().unwrap();
    assert_eq!(problem.kind, ProblemKind::Conflict);
    assert_eq!(problem.detail, "no other server of web takes new connections: expected one, or `force`");
    assert_eq!(client.drain_server("s2", &forced_request).await.unwrap().state, ServerState::Draining);
    assert_eq!(client.undrain_server("s2").await.unwrap().drain, None);

    env.controller.kill().await;
    // The server is active in another document.
    env.test_directory.write_fleet_file(&["s1", "s2", "s3"], WEB_SERVICE_TOML);
    env.controller = env.test_directory.start_controller().await;
    let client = env.client_with_role(Role::Operator);
    let drain_after_restart = client.drain_status("s1").await.unwrap().drain.unwrap();
    assert_eq!(drain_after_restart.origin, DrainOrigin::Command);
    // The stored clock stops while no controller runs, and it is saved once a second.
    let allowed_deviation_ms = 1_000 + start_time.elapsed().as_millis() as u64;
    let deviation_ms = drain_after_restart.since_unix_ms.unwrap().abs_diff(drain.since_unix_ms.unwrap());
    assert!(deviation_ms <= allowed_deviation_ms, "{drain_after_restart:?}, {drain:?}");
    let status = client.status(false).await.unwrap();
    let server_states: Vec<_> = status.servers.iter().map(|server| (server.name.as_str(), server.state)).collect();
    assert!(
        server_states.contains(&("s1", ServerState::Draining)) && server_states.contains(&("s2", ServerState::Active)),
        "{server_states:?}"
    );
    for _ in 0..2 {
        let drain_status = client.undrain_server("s1").await.unwrap();
        assert_eq!((drain_status.state, drain_status.drain), (ServerState::Active, None));
    }
    let (_, events) = env.send_request("GET", "/v1/events", Some(&token), None).await;
    assert!(events.to_string().contains(": undrained"), "{events}");
}

/// A browser that has logged in with a token continues with a cookie, which has a viewer's rights.
#[tokio::test]
async fn session_cookie_permits_reads_but_no_changes() {
    let env = ApiTestEnv::start(TestDirectory::new(&["s1"], WEB_SERVICE_TOML)).await;
    let build_url = |path: &str| format!("http://{}{path}", env.controller.api_address);
    let page_response = env.http_client.get(build_url("/")).send().await.unwrap();
    assert!(page_response.headers()["content-security-policy"].to_str().unwrap().starts_with("default-src 'none'"));
    assert!(page_response.text().await.unwrap().contains("<title>coreward</title>"));
    let login_response = env
        .http_client
        .post(build_url("/v1/session"))
        .bearer_auth(env.read_token(Role::Operator))
        .send()
        .await
        .unwrap();
    let cookie = login_response.headers()["set-cookie"].to_str().unwrap().split(';').next().unwrap().to_owned();
    let add_cookie = |request: reqwest::RequestBuilder| request.header("cookie", &cookie);
    let status = add_cookie(env.http_client.get(build_url("/v1/status"))).send().await.unwrap().status();
    assert_eq!(status, StatusCode::OK);
    let rotation_request =
        add_cookie(env.http_client.post(build_url("/v1/keys/rotate"))).json(&serde_json::json!({"force": true}));
    assert_eq!(rotation_request.send().await.unwrap().status(), StatusCode::FORBIDDEN);
    let logout_response = add_cookie(env.http_client.delete(build_url("/v1/session"))).send().await.unwrap();
    assert_eq!(logout_response.status(), StatusCode::NO_CONTENT);
    let status = add_cookie(env.http_client.get(build_url("/v1/status"))).send().await.unwrap().status();
    assert_eq!(status, StatusCode::UNAUTHORIZED);
}

/// A watcher is first sent the present state, and then events. After a reconnect, it is sent the missed events.
#[tokio::test]
async fn watcher_is_sent_missed_events_after_a_reconnect() {
    let test_directory = TestDirectory::new(&[], "");
    test_directory.write_controller_config("");
    let env = ApiTestEnv::start(test_directory).await;
    let read_until = async |last_event_id: Option<&str>, end_marker: &str| {
        let url = format!("http://{}/v1/watch?interval_ms=250", env.controller.api_address);
        let mut request = env.http_client.get(url).bearer_auth(env.read_token(Role::Viewer));
        if let Some(id) = last_event_id {
            request = request.header("last-event-id", id);
        }
        let mut response = request.send().await.unwrap();
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let mut received_text = String::new();
        with_timeout(end_marker, async {
            // The text must be read to the end of an event.
            while !(received_text.contains(end_marker) && received_text.ends_with("\n\n")) {
                received_text += std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap();
            }
        })
        .await;
        received_text
    };
    let first_messages = read_until(None, "event: status").await;
    assert!(first_messages.contains("event: status\ndata: {\"configuration_generation\":"), "{first_messages}");
    let start_messages = read_until(None, "the controller has started").await;
    let id = start_messages.lines().find_map(|line| line.strip_prefix("id: ")).unwrap().to_owned();
    let text = format!("[[server]]\nname = \"s1\"\naddress = \"10.2.0.1\"\n{WEB_SERVICE_TOML}");
    let document = NewFleet { name: "a.toml".into(), text, generation: 0, dry_run: false };
    env.client_with_role(Role::Operator).apply_fleet(&document).await.unwrap();
    let messages_after_reconnect = read_until(Some(&id), "new, at 10.2.0.1: ").await;
    assert!(messages_after_reconnect.contains("applied the document of generation 1"), "{messages_after_reconnect}");
    assert!(!messages_after_reconnect.contains("the controller has started"), "{messages_after_reconnect}");
}

#[tokio::test]
async fn requests_in_the_api_manual_work() {
    let env = ApiTestEnv::start(TestDirectory::new(&["s1"], WEB_SERVICE_TOML)).await;
    let api_manual = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/api.md")).unwrap();
    let script = api_manual.split("```sh\n").nth(1).unwrap().split("```").next().unwrap();
    let directory = env.test_directory.temporary_directory.path().display().to_string();
    let script = script
        .replace("/var/lib/coreward", &directory)
        .replace("127.0.0.1:7401", &env.controller.api_address.to_string());
    assert!(script.matches("curl ").count() >= 5, "{script}");
    let curl_output = tokio::process::Command::new("sh").args(["-e", "-c", &script]).output();
    let output = with_timeout("curl", curl_output).await.unwrap();
    let printed_text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{printed_text}{}", String::from_utf8_lossy(&output.stderr));
    // The state is `settling` while the controller waits for agents.
    let is_leading = ["ready", "settling"].iter().any(|state| printed_text.contains(&format!("\"state\":\"{state}\"")));
    assert!(is_leading && printed_text.contains("expected a number above 0"), "{printed_text}");
}
