//! Tests of the commands' output.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use coreward_api::types::{
    ActiveDrain, ConnectionCounts, DispatchedService, DispatchedWorker, DrainOrigin, Explain, ExplainedServer,
    Explanation, KeyPhase, Keys, LoadBalancer, LoadBalancerState, PacketKind, Rack, ReportState, RssGroup, Server,
    ServerClock, ServerState, Service, ServiceMember, StampedService, Status,
};
use coreward_model::tuple::TransportProtocol;

use super::*;

/// Returns the state of a server's timestamp clock, which a load balancer must measure to stamp cookies itself.
fn sample_server_clock(server: &str, state: &str, problem: &str) -> ServerClock {
    ServerClock {
        service: "old".into(),
        server: server.into(),
        clock_state: state.into(),
        syn_acks: 9,
        syn_acks_with_timestamps: 8,
        disagreeing_syn_acks: 0,
        problem: (!problem.is_empty()).then(|| problem.to_owned()),
    }
}

fn sample_dispatched_service() -> DispatchedService {
    let sample_worker = |worker, outstanding, eligible| DispatchedWorker {
        worker,
        pid: 812 + worker,
        outstanding,
        outstanding_work_us: 12.5,
        queued: outstanding / 2,
        dispatched: 1000,
        completed: 990,
        abandoned: 10 - u64::from(outstanding),
        dropped: 1,
        eligible,
    };
    DispatchedService {
        listen: "0.0.0.0:53".into(),
        policy: "jsq".into(),
        workers: vec![sample_worker(0, 0, true), sample_worker(1, 4, false)],
        counters: BTreeMap::from([("over_bound".into(), 7), ("untracked".into(), 0)]),
    }
}

fn sample_server(n: u8, state: ServerState, core_load: &[f64]) -> Server {
    Server {
        name: format!("s{n}"),
        id: u32::from(n) * 1000,
        address: IpAddr::from([10, 2, 0, 10 + n]),
        vlan: None,
        state,
        state_reason: String::new(),
        state_for_ms: None,
        report_state: ReportState::Fresh,
        core_loads: core_load.to_vec(),
        report_age_ms: 40,
        open_connections: 12,
        rss: None,
        rss_matched_syns: 0,
        rss_mismatched_syns: 0,
        warnings: Vec::new(),
        weight: n.into(),
        capacity: 0.0,
        configuration_generation: 0,
        counters: BTreeMap::new(),
        dispatched_services: Vec::new(),
        drain: None,
        connection_counts: None,
        rack: None,
        permitted_racks: None,
    }
}

fn sample_load_balancer_state() -> LoadBalancerState {
    LoadBalancerState {
        table_generations: BTreeMap::from([("web".into(), 76)]),
        unresolved_servers: vec!["s2".into()],
        counters: BTreeMap::from([("established".into(), 900), ("new_connection".into(), 12), ("broadcast".into(), 0)]),
        xdp_mode: "native".into(),
        vlan: Some(10),
        configuration_generation: 3,
        event_counters: BTreeMap::from([("connection_unknown".into(), 3)]),
        connection_count: 40,
        unresolved_load_balancers: vec!["lb2".into()],
        server_clocks: vec![
            sample_server_clock("s1", "per-connection", ""),
            sample_server_clock("s2", "differs", "look at its sysctl"),
        ],
        stamped_services: vec![StampedService { service: "old".into(), cookie_packets: 1_999, flow_table_packets: 1 }],
        warnings: vec!["it does not route".into()],
    }
}

fn sample_status() -> Status {
    let sample_load_balancer = |name: &str, owner| LoadBalancer {
        name: name.into(),
        state: None,
        state_age_ms: 0,
        connected: false,
        alive: false,
        connection_table_owner: Some(owner),
        address: None,
    };
    let connected_load_balancer = LoadBalancer {
        state: Some(sample_load_balancer_state()),
        state_age_ms: 300,
        connected: true,
        alive: true,
        address: Some(IpAddr::from([10, 2, 0, 1])),
        ..sample_load_balancer("lb1", 0)
    };
    Status {
        configuration_generation: 3,
        report_interval_ms: 100,
        warnings: Vec::new(),
        accepted_reports: 1234,
        rejected_reports: BTreeMap::from([("out_of_order".into(), 2), ("no_cores".into(), 0)]),
        services: vec![Service {
            name: "web".into(),
            address: "10.200.0.1:80/tcp".parse().unwrap(),
            policy: "crossrss-plus".into(),
            consistency: "stateful".into(),
            timestamps: "server".into(),
            bucket_count: 128,
            table_generation: 77,
            table_age_ms: 30,
            servers: vec!["s1".into(), "s2".into()],
            rss_groups: vec![RssGroup { key: None, key_fingerprint: "377ecc6a".into(), servers: vec!["s1".into()] }],
            warnings: vec!["look".into()],
            members: vec![
                sample_member("s1", ServerState::Active),
                sample_member("s2", ServerState::Down),
                sample_member("s0", ServerState::Gone),
            ],
            health_check_kind: Some("http".into()),
            when_all_down: "fail-open".into(),
            failing_open: false,
        }],
        keys: Keys {
            current_key: 1,
            current_since_unix_s: 1_000_000,
            rotation_phase: KeyPhase::Steady,
            configuration_generation: 0,
            pending_peers: Vec::new(),
            min_key_age_s: 0,
            rotation_interval_s: 0,
        },
        servers: vec![
            Server {
                rss_matched_syns: 97,
                rss_mismatched_syns: 3,
                warnings: vec!["aRFS is on".into()],
                dispatched_services: vec![sample_dispatched_service()],
                ..sample_server(1, ServerState::Active, &[0.0, 0.3, 0.55, 1.2])
            },
            Server {
                report_state: ReportState::None,
                state_reason: "lb1: connection refused".into(),
                state_for_ms: Some(61_500),
                vlan: Some(20),
                ..sample_server(2, ServerState::Down, &[])
            },
        ],
        load_balancers: vec![connected_load_balancer, sample_load_balancer("lb2", 1)],
        racks: vec![Rack {
            name: "rack1".into(),
            version: "0.1.0".into(),
            last_message_age_ms: 60,
            servers: vec!["s1".into(), "s2".into()],
            permitted_servers: 2,
        }],
    }
}

fn sample_member(server: &str, state: ServerState) -> ServiceMember {
    ServiceMember {
        server: server.into(),
        state,
        state_reason: String::new(),
        state_for_ms: None,
        health_checks: Vec::new(),
    }
}

const SAMPLE_STATUS_TEXT: &str = "\
configuration 3, a report every 100 ms: 1234 taken, 2 (out_of_order 2) rejected

service web at 10.200.0.1:80/tcp: crossrss-plus, 128 buckets, stateful, timestamps by servers
  table      generation 77, 30 ms old
  servers    s1 s2
  health     http: 1 of 2 take new connections
  RSS group  377ecc6a: s1
  ! look

 server    id  address            state   report  open  weight  RSS as predicted  mean   max  cores
 s1      1000  10.2.0.11          active   40 ms    12       1         97 of 100  0.51  1.20  ▁▃▅█
 s2      2000  10.2.0.12 VLAN 20  down     never     -       2                 -     -     -
  s2: down for 1 min 1 s: lb1: connection refused
  ! s1: aRFS is on

dispatch of 0.0.0.0:53 at s1: jsq
  worker  pid  outstanding  queued  dispatched  completed  abandoned  dropped  eligible
       0  812            0       0        1000        990         10        1       yes
       1  813            4       2        1000        990          6        1        no
  counters   over_bound 7

rack rack1 (0.1.0), last message 60 ms ago, may report for all of 2 servers
  servers    s1 s2

load balancer lb1: XDP native, as of 300 ms ago
  owner      0, at 10.2.0.1
  tables     web 76
  VLAN       10
  packets    established 900, new_connection 12
  events     connection_unknown 3
  table      40 connections
  ! no MAC address known of load balancer lb2
  ! no MAC address known of s2
  clocks     old: 1 of 2 servers', 99.95 % of established packets by the cookie
  ! s2 of old is not stamped: look at its sysctl
  ! it does not route

load balancer lb2: lost
  owner      1, at no address

cookie keys: key 1 stamps, for 1 h 0 min now
  rotation   by `coreward keys rotate`
";

#[test]
fn status_is_printed_as_text() {
    assert_eq!(status::format_status(&sample_status(), Duration::from_secs(1_003_600)), SAMPLE_STATUS_TEXT);
}

fn load_balancer_lines(state: LoadBalancerState) -> String {
    let mut status = sample_status();
    status.load_balancers[0].state = Some(state);
    let text = status::format_status(&status, Duration::ZERO);
    text.split("\n\n").find(|section| section.starts_with("load balancer lb1")).unwrap().to_owned()
}

#[test]
fn load_balancer_without_configuration_or_table_is_not_ready() {
    let unconfigured_state = LoadBalancerState {
        table_generations: BTreeMap::new(),
        unresolved_servers: Vec::new(),
        configuration_generation: 0,
        ..sample_load_balancer_state()
    };
    let state_without_table = LoadBalancerState { configuration_generation: 3, ..unconfigured_state.clone() };
    assert!(
        load_balancer_lines(unconfigured_state).contains("  ! no configuration of this controller is in force yet\n")
    );
    assert!(load_balancer_lines(state_without_table).contains("  ! no table is in force yet for web\n"));
    assert!(!load_balancer_lines(sample_load_balancer_state()).contains("in force yet"));
}

#[test]
fn status_is_printed_as_json() {
    let json = serde_json::to_value(sample_status()).unwrap();
    assert_eq!(serde_json::from_value::<Status>(json.clone()).unwrap(), sample_status());
    assert_eq!(json["services"][0]["address"], "10.200.0.1:80/tcp");
    assert_eq!(json["servers"][0]["address"], "10.2.0.11");
    assert_eq!(json["racks"][0]["servers"][1], "s2");
    assert_eq!(json["load_balancers"][0]["state"]["table_generations"]["web"], 76);
    let clocks = &json["load_balancers"][0]["state"]["server_clocks"];
    assert_eq!(
        (&clocks[0]["clock_state"], &clocks[1]["problem"]),
        (&"per-connection".into(), &"look at its sysctl".into())
    );
    assert!(clocks[0]["problem"].is_null() && clocks[1]["syn_acks"] == 9);
    assert_eq!(json["load_balancers"][0]["state"]["warnings"][0], "it does not route");
    assert_eq!(json["rejected_reports"]["no_cores"], 0);
    let dispatch = &json["servers"][0]["dispatched_services"][0];
    assert_eq!((&dispatch["listen"], &dispatch["counters"]["over_bound"]), (&"0.0.0.0:53".into(), &7.into()));
    assert_eq!((&dispatch["workers"][1]["abandoned"], &dispatch["workers"][1]["eligible"]), (&6.into(), &false.into()));
    assert_eq!(dispatch["workers"][0]["outstanding_work_us"], 12.5);
    assert_eq!(json["servers"][1]["dispatched_services"], serde_json::json!([]));
    assert!(json["servers"][1]["rss"].is_null());
    assert_eq!(
        (&json["services"][0]["consistency"], &json["keys"]["rotation_phase"]),
        (&"stateful".into(), &"steady".into())
    );
    assert_eq!(
        (&json["load_balancers"][0]["connection_table_owner"], &json["load_balancers"][1]["alive"]),
        (&0.into(), &false.into())
    );
}

fn sample_explanation() -> Explanation {
    let sample_explained_server = |n: u32, core: Option<u32>| ExplainedServer {
        name: format!("s{n}"),
        id: n,
        vlan: None,
        hash: core.map(|_| 0xdead_beef),
        bucket: core.map(|_| 111),
        core,
        core_load: core.map(|_| 0.25),
        eligible: n != 3,
    };
    Explanation {
        service: "web".into(),
        policy: "crossrss".into(),
        table_generation: 5,
        servers: vec![
            sample_explained_server(1, Some(3)),
            sample_explained_server(2, None),
            sample_explained_server(3, Some(0)),
        ],
        chosen_server: Some("s1".into()),
        reason: "bucket 111 of 128 goes to s1: because".into(),
        forwarding: "l2".into(),
        outer_source_port: None,
        cookie_share: None,
    }
}

const SAMPLE_EXPLANATION_TEXT: &str = "\
10.1.0.7:40312 -> 10.200.0.1:80/tcp (web, crossrss, table 5): s1

 server  id      hash  bucket  core  load now
 s1       1  deadbeef     111     3     0.250  <- chosen
 s2       2         -       -     -         -
 s3       3  deadbeef     111     0     0.250  takes no new connections

bucket 111 of 128 goes to s1: because.
";

#[test]
fn explanation_is_printed_as_text() {
    let explanation = sample_explanation();
    let request = Explain {
        vip: "10.200.0.1:80".parse().unwrap(),
        protocol: TransportProtocol::Tcp,
        client: "10.1.0.7:40312".parse().unwrap(),
        packet: PacketKind::NewConnection,
        tsecr: None,
    };
    assert_eq!(explain::format_explanation(&explanation, &request), SAMPLE_EXPLANATION_TEXT);
    let explanation = Explanation { forwarding: "gue".into(), outer_source_port: Some(50_123), ..explanation };
    let outer_header_note = "Forwarded by gue from source port 50123: NICs hash the outer header, so packets may \
                             arrive at another core.\n";
    assert_eq!(
        explain::format_explanation(&explanation, &request),
        SAMPLE_EXPLANATION_TEXT.to_owned() + outer_header_note
    );
    let explanation =
        Explanation { forwarding: "l2".into(), outer_source_port: None, cookie_share: Some(0.9995), ..explanation };
    let mut explanation_in_vlan = explanation.clone();
    explanation_in_vlan.servers[0].vlan = Some(20);
    let vlan_and_cookie_notes =
        "Frames to s1 are in VLAN 20.\nLoad balancers decide 99.95 % of its established packets by the cookie.\n";
    assert_eq!(
        explain::format_explanation(&explanation_in_vlan, &request),
        SAMPLE_EXPLANATION_TEXT.to_owned() + vlan_and_cookie_notes
    );
    let cookie_note = "Load balancers decide 99.95 % of its established packets by the cookie.\n";
    assert_eq!(explain::format_explanation(&explanation, &request), SAMPLE_EXPLANATION_TEXT.to_owned() + cookie_note);
}

#[test]
fn unreachable_controller_and_invalid_token_are_reported() {
    // This port was free a moment ago, and no other process listens at this loopback address.
    let closed_address = std::net::TcpListener::bind("127.0.0.2:0").unwrap().local_addr().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let token_path = directory.path().join("operator.token");
    let error = ControllerClient::new(closed_address.into(), &token_path).unwrap_err().to_string();
    assert!(error.contains("No such file") && error.contains("--token-file"), "{error}");
    // No request is sent if the token is invalid.
    for invalid_token in ["", "short", "two\nlines, 32 characters and more of it"] {
        std::fs::write(&token_path, invalid_token).unwrap();
        std::fs::set_permissions(&token_path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let error = ControllerClient::new(closed_address.into(), &token_path).unwrap_err().to_string();
        assert!(error.contains("operator.token holds no token: expected at least 32 characters"), "{error}");
    }
    std::fs::remove_file(&token_path).unwrap();
    coreward_http::tokens::ApiTokens::open(directory.path()).unwrap();
    let client = ControllerClient::new(closed_address.into(), &token_path).unwrap();
    let error = super::fetch_status(&client, false, RenderedOutputFormat::Text).unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "no controller answers at {closed_address} (Connection refused (os error 111)): expected a running \
             `coreward controller` with this `api`"
        )
    );
}

#[test]
fn draining_server_shows_its_remaining_connections() {
    let services = BTreeMap::from([("web".to_owned(), 10), ("api".to_owned(), 2)]);
    let mut status = sample_status();
    status.servers[0].drain =
        Some(ActiveDrain { origin: DrainOrigin::Command, since_unix_ms: None, services: Vec::new() });
    let text = status::format_status(&status, Duration::from_secs(1));
    assert!(text.contains("  s1: how many connections remain is not known\n"), "{text}");
    status.servers[0].connection_counts = Some(ConnectionCounts { age_ms: 700, connections_by_service: services });
    let text = status::format_status(&status, Duration::from_secs(1));
    assert!(text.contains("  s1: 12 connections as counted 0.7 s ago (api 2, web 10)\n"), "{text}");
}
