//! Audit entries, rejected updates and concurrent changes, with a controller in this process.

use coreward_api::types::{AuditQuery, DrainServer, NewFleet, ServerState};
use coreward_http::{Problem, ProblemKind};
use coreward_wire::v1::{self, load_balancer_message::Message};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::support::{RunningController, TestDirectory, with_timeout};

/// Returns a test directory without a fleet's file: the fleet is applied by the API.
fn home() -> TestDirectory {
    let home = TestDirectory { directory: tempfile::tempdir().unwrap() };
    home.write_controllers_file("");
    home
}

fn document(servers: &[&str]) -> String {
    let server = |name: &&str| format!("[[server]]\nname = \"{name}\"\naddress = \"10.2.0.{}\"\n", &name[1..]);
    let servers: String = servers.iter().map(server).collect();
    format!("{servers}[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\nhealth = {{ check = \"tcp\" }}\n")
}

async fn apply(running: &RunningController, text: &str, generation: u64) {
    let fleet = NewFleet { name: "fleet.toml".into(), text: text.into(), generation, dry_run: false };
    running.client.put_fleet(&fleet).await.unwrap();
}

async fn load_balancer(running: &RunningController) -> mpsc::Sender<v1::LoadBalancerMessage> {
    let (sender, receiver) = mpsc::channel(4);
    let registration =
        v1::LoadBalancerRegistration { name: "lb1".into(), version: "test".into(), ..Default::default() };
    send(&sender, Message::Registration(registration)).await;
    let mut updates = running.client().await.load_balancer(ReceiverStream::new(receiver)).await.unwrap().into_inner();
    tokio::spawn(async move { while let Ok(Some(_)) = updates.message().await {} });
    sender
}

/// Waits, because the API limits the number of requests per second.
async fn pause() {
    tokio::time::sleep(std::time::Duration::from_millis(60)).await;
}

async fn send(sender: &mpsc::Sender<v1::LoadBalancerMessage>, message: Message) {
    sender.send(v1::LoadBalancerMessage { message: Some(message) }).await.unwrap();
}

#[tokio::test]
async fn audit_entry_survives_a_restart() {
    let home = home();
    let running = home.start().await;
    apply(&running, &document(&["s1", "s2"]), 0).await;
    running.client.drain("s1", &DrainServer::default()).await.unwrap();
    running.client.drain("s1", &DrainServer::default()).await.unwrap();
    apply(&running, &document(&["s1", "s2", "s3"]), 1).await;
    running.kill().await;

    let running = home.start().await;
    running.client.undrain("s1").await.unwrap();
    let audit = running.client.audit(&AuditQuery::default()).await.unwrap();
    let seen: Vec<(u64, &str, &str, &str, &str)> = audit
        .entries
        .iter()
        .map(|entry| (entry.id, &*entry.action, &*entry.target, &*entry.before, &*entry.after))
        .collect();
    let service = "+ service web: health = { check = \"tcp\" }, vip = \"10.200.0.1:80\"";
    let added = |n: u8| format!("+ server s{n}: address = \"10.2.0.{n}\"");
    let first = format!("generation 1: {}; {}; {service}", added(1), added(2));
    let second = format!("generation 2: {}", added(3));
    assert_eq!(
        seen,
        [
            (1, "apply", "", "generation 0", first.as_str()),
            (2, "drain", "s1", "not drained", "drained"),
            (3, "apply", "", "generation 1", second.as_str()),
            (4, "undrain", "s1", "drained", "not drained"),
        ]
    );
    for entry in &audit.entries {
        assert!(entry.actor.starts_with("operator token ") && entry.actor.len() == "operator token ".len() + 8);
        assert_eq!(entry.from_address, "127.0.0.1");
    }
    let newest = running.client.audit(&AuditQuery { after: 0, limit: Some(1) }).await.unwrap();
    assert_eq!(newest.entries, audit.entries[3..]);
}

#[tokio::test]
async fn update_rejected_by_a_load_balancer_is_reported() {
    let home = home();
    let running = home.start().await;
    apply(&running, &document(&["s1"]), 0).await;
    let balancer = load_balancer(&running).await;
    let newest = with_timeout("the load balancer", async {
        loop {
            let seen = running.client.acknowledgements().await.unwrap();
            if seen.waiting_count == 1 {
                break seen;
            }
            pause().await;
        }
    })
    .await;
    assert_eq!((newest.waiting[0].part.as_str(), newest.waiting[0].name.as_str()), ("lb", "lb1"));
    let reason = "services[0].mode.consistency: \"quantum\"".to_owned();
    let refused = v1::RefusedUpdate { service: "web".into(), generation: 2, reason: reason.clone(), table: false };
    // The controller may make another configuration meanwhile.
    let seen = with_timeout("its answer", async {
        loop {
            let seen = running.client.acknowledgements().await.unwrap();
            if seen.waiting_count == 0 {
                break seen;
            }
            let state = v1::LoadBalancerState {
                configuration_generation: seen.configuration_generation,
                refused: vec![refused.clone()],
                ..Default::default()
            };
            send(&balancer, Message::State(state)).await;
            pause().await;
        }
    })
    .await;
    assert_eq!((seen.acknowledged_count, seen.refused_count), (1, 1));
    let [refused] = &seen.refused[..] else { panic!("{seen:?}") };
    assert_eq!((refused.name.as_str(), refused.service.as_deref()), ("lb1", Some("web")));
    assert_eq!((refused.kind.as_str(), refused.reason.as_str()), ("configuration", reason.as_str()));

    let state = running.status().await.load_balancers.remove(0).state.unwrap();
    assert_eq!(state.warnings, [format!("it refuses configuration 2 of service web: {reason}")]);

    let connected = running.client.forget_load_balancer("lb1").await.unwrap_err();
    assert_eq!(connected.downcast_ref::<Problem>().unwrap().kind, ProblemKind::Conflict);
    drop(balancer);
    let forgotten = async {
        while let Err(error) = running.client.forget_load_balancer("lb1").await {
            let kind = error.downcast_ref::<Problem>().unwrap().kind;
            assert!(matches!(kind, ProblemKind::Conflict | ProblemKind::TooManyRequests), "{error}");
            pause().await;
        }
    };
    with_timeout("the end of its stream", forgotten).await;
    assert_eq!(running.status().await.load_balancers, []);
}

/// Server s3 is down: of the two healthy servers, only one may be drained.
#[tokio::test]
async fn concurrent_drains_leave_the_last_healthy_server() {
    let home = home();
    let running = home.start().await;
    apply(&running, &document(&["s1", "s2", "s3"]), 0).await;
    let balancer = load_balancer(&running).await;
    let status = running.status().await;
    let servers = status.servers.iter().map(|server| v1::ServerHealth {
        server_id: server.id,
        up: Some(server.name != "s3"),
        ..Default::default()
    });
    let services = vec![v1::ServiceHealth { service_index: 0, servers: servers.collect() }];
    send(&balancer, Message::Health(v1::LoadBalancerHealth { services })).await;
    with_timeout("s3 down", async {
        let is_down = |server: &coreward_api::types::Server| server.name == "s3" && server.state == ServerState::Down;
        while !running.status().await.servers.iter().any(is_down) {
            pause().await;
        }
    })
    .await;
    let request = DrainServer::default();
    let drains = tokio::join!(running.client.drain("s1", &request), running.client.drain("s2", &request));
    let outcomes = [drains.0, drains.1];
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1, "{outcomes:?}");
    let refused = outcomes.into_iter().find_map(Result::err).unwrap();
    assert_eq!(refused.downcast_ref::<Problem>().unwrap().kind, ProblemKind::Conflict, "{refused}");
}
