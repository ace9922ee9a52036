//! Tests of audit entries, rejected updates and concurrent changes, with a controller in this process.

use coreward_api::types::{AuditQuery, DrainServer, NewFleet, ServerState};
use coreward_http::{Problem, ProblemKind};
use coreward_wire::v1::{self, load_balancer_message::Message};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::support::{RunningController, TestDirectory, with_timeout};

/// Returns a test directory without a fleet file, because the tests apply the fleet through the API.
fn directory_without_fleet_file() -> TestDirectory {
    let test_directory = TestDirectory { temporary_directory: tempfile::tempdir().unwrap() };
    test_directory.write_controller_config("");
    test_directory
}

fn fleet_document_text(servers: &[&str]) -> String {
    let format_server_section =
        |name: &&str| format!("[[server]]\nname = \"{name}\"\naddress = \"10.2.0.{}\"\n", &name[1..]);
    let server_sections: String = servers.iter().map(format_server_section).collect();
    format!("{server_sections}[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\nhealth = {{ check = \"tcp\" }}\n")
}

async fn apply_document(controller: &RunningController, text: &str, generation: u64) {
    let fleet = NewFleet { name: "fleet.toml".into(), text: text.into(), generation, dry_run: false };
    controller.client.apply_fleet(&fleet).await.unwrap();
}

async fn connect_load_balancer(controller: &RunningController) -> mpsc::Sender<v1::LoadBalancerMessage> {
    let (sender, receiver) = mpsc::channel(4);
    let registration =
        v1::LoadBalancerRegistration { name: "lb1".into(), version: "test".into(), ..Default::default() };
    send_message(&sender, Message::Registration(registration)).await;
    let mut updates = controller
        .connect_control_client()
        .await
        .load_balancer(ReceiverStream::new(receiver))
        .await
        .unwrap()
        .into_inner();
    tokio::spawn(async move { while let Ok(Some(_)) = updates.message().await {} });
    sender
}

/// Waits until the API accepts further requests, whose number per second is limited.
async fn wait_until_rate_limit_permits() {
    tokio::time::sleep(std::time::Duration::from_millis(60)).await;
}

async fn send_message(sender: &mpsc::Sender<v1::LoadBalancerMessage>, message: Message) {
    sender.send(v1::LoadBalancerMessage { message: Some(message) }).await.unwrap();
}

#[tokio::test]
async fn audit_entry_survives_a_restart() {
    let test_directory = directory_without_fleet_file();
    let controller = test_directory.start_controller().await;
    apply_document(&controller, &fleet_document_text(&["s1", "s2"]), 0).await;
    controller.client.drain_server("s1", &DrainServer::default()).await.unwrap();
    controller.client.drain_server("s1", &DrainServer::default()).await.unwrap();
    apply_document(&controller, &fleet_document_text(&["s1", "s2", "s3"]), 1).await;
    controller.kill().await;

    let controller = test_directory.start_controller().await;
    controller.client.undrain_server("s1").await.unwrap();
    let audit = controller.client.audit_log(&AuditQuery::default()).await.unwrap();
    let audit_entries: Vec<(u64, &str, &str, &str, &str)> = audit
        .entries
        .iter()
        .map(|entry| (entry.id, &*entry.action, &*entry.target, &*entry.before, &*entry.after))
        .collect();
    let service_change = "+ service web: health = { check = \"tcp\" }, vip = \"10.200.0.1:80\"";
    let added_server_text = |n: u8| format!("+ server s{n}: address = \"10.2.0.{n}\"");
    let first_change = format!("generation 1: {}; {}; {service_change}", added_server_text(1), added_server_text(2));
    let second_change = format!("generation 2: {}", added_server_text(3));
    assert_eq!(
        audit_entries,
        [
            (1, "apply", "", "generation 0", first_change.as_str()),
            (2, "drain", "s1", "not drained", "drained"),
            (3, "apply", "", "generation 1", second_change.as_str()),
            (4, "undrain", "s1", "drained", "not drained"),
        ]
    );
    for entry in &audit.entries {
        assert!(entry.actor.starts_with("operator token ") && entry.actor.len() == "operator token ".len() + 8);
        assert_eq!(entry.from_address, "127.0.0.1");
    }
    let newest_entries = controller.client.audit_log(&AuditQuery { after: 0, limit: Some(1) }).await.unwrap();
    assert_eq!(newest_entries.entries, audit.entries[3..]);
}

#[tokio::test]
async fn update_rejected_by_a_load_balancer_is_reported() {
    let test_directory = directory_without_fleet_file();
    let controller = test_directory.start_controller().await;
    apply_document(&controller, &fleet_document_text(&["s1"]), 0).await;
    let load_balancer_sender = connect_load_balancer(&controller).await;
    let acknowledgements = with_timeout("the load balancer", async {
        loop {
            let acknowledgements = controller.client.configuration_acknowledgements().await.unwrap();
            if acknowledgements.pending_count == 1 {
                break acknowledgements;
            }
            wait_until_rate_limit_permits().await;
        }
    })
    .await;
    assert_eq!(
        (acknowledgements.pending_peers[0].component.as_str(), acknowledgements.pending_peers[0].name.as_str()),
        ("lb", "lb1")
    );
    let rejection_reason = "services[0].mode.consistency: \"quantum\"".to_owned();
    let rejected_update =
        v1::RejectedUpdate { service: "web".into(), generation: 2, reason: rejection_reason.clone(), table: false };
    // The controller may make another configuration meanwhile.
    let acknowledgements = with_timeout("its answer", async {
        loop {
            let acknowledgements = controller.client.configuration_acknowledgements().await.unwrap();
            if acknowledgements.pending_count == 0 {
                break acknowledgements;
            }
            let state = v1::LoadBalancerState {
                configuration_generation: acknowledgements.configuration_generation,
                rejected: vec![rejected_update.clone()],
                ..Default::default()
            };
            send_message(&load_balancer_sender, Message::State(state)).await;
            wait_until_rate_limit_permits().await;
        }
    })
    .await;
    assert_eq!((acknowledgements.acknowledged_count, acknowledgements.rejected_count), (1, 1));
    let [listed_rejection] = &acknowledgements.rejected[..] else { panic!("{acknowledgements:?}") };
    assert_eq!((listed_rejection.name.as_str(), listed_rejection.service.as_deref()), ("lb1", Some("web")));
    assert_eq!(
        (listed_rejection.update_kind.as_str(), listed_rejection.reason.as_str()),
        ("configuration", rejection_reason.as_str())
    );

    let load_balancer_state = controller.fetch_status().await.load_balancers.remove(0).state.unwrap();
    assert_eq!(
        load_balancer_state.warnings,
        [format!("it rejects configuration 2 of service web: {rejection_reason}")]
    );

    let connected_error = controller.client.forget_load_balancer("lb1").await.unwrap_err();
    assert_eq!(connected_error.downcast_ref::<Problem>().unwrap().kind, ProblemKind::Conflict);
    drop(load_balancer_sender);
    let forget_when_disconnected = async {
        while let Err(error) = controller.client.forget_load_balancer("lb1").await {
            let problem_kind = error.downcast_ref::<Problem>().unwrap().kind;
            assert!(matches!(problem_kind, ProblemKind::Conflict | ProblemKind::TooManyRequests), "{error}");
            wait_until_rate_limit_permits().await;
        }
    };
    with_timeout("the end of its stream", forget_when_disconnected).await;
    assert_eq!(controller.fetch_status().await.load_balancers, []);
}

/// Server s3 is down, so only one of the two healthy servers may be drained.
#[tokio::test]
async fn concurrent_drains_leave_one_healthy_server() {
    let test_directory = directory_without_fleet_file();
    let controller = test_directory.start_controller().await;
    apply_document(&controller, &fleet_document_text(&["s1", "s2", "s3"]), 0).await;
    let load_balancer_sender = connect_load_balancer(&controller).await;
    let status = controller.fetch_status().await;
    let servers = status.servers.iter().map(|server| v1::ServerHealth {
        server_id: server.id,
        up: Some(server.name != "s3"),
        ..Default::default()
    });
    let services = vec![v1::ServiceHealth { service_index: 0, servers: servers.collect() }];
    send_message(&load_balancer_sender, Message::Health(v1::LoadBalancerHealth { services })).await;
    with_timeout("s3 down", async {
        let is_s3_down =
            |server: &coreward_api::types::Server| server.name == "s3" && server.state == ServerState::Down;
        while !controller.fetch_status().await.servers.iter().any(is_s3_down) {
            wait_until_rate_limit_permits().await;
        }
    })
    .await;
    let request = DrainServer::default();
    let drain_results =
        tokio::join!(controller.client.drain_server("s1", &request), controller.client.drain_server("s2", &request));
    let drain_results = [drain_results.0, drain_results.1];
    assert_eq!(drain_results.iter().filter(|outcome| outcome.is_ok()).count(), 1, "{drain_results:?}");
    let drain_error = drain_results.into_iter().find_map(Result::err).unwrap();
    assert_eq!(drain_error.downcast_ref::<Problem>().unwrap().kind, ProblemKind::Conflict, "{drain_error}");
}
