//! Daemons with only the capabilities of their systemd units work as with all capabilities.

use coreward_metrics::metric_declarations::Component;
use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::fleet::{Fleet, ServerAdminState, TestbedFleetOptions, systemd_unit_capabilities};
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, Testbed, TestbedOptions, find_missing_testbed_rights, skip_if};

use crate::support::{
    assert_eventually, read_effective_capabilities, retained_capability_mask, send_requests, to_capability_mask,
    wait_until_configuration_in_force,
};

fn parse_capability(name: &str) -> caps::Capability {
    name.parse().unwrap_or_else(|_| panic!("{name} is no capability"))
}

fn build_dispatch_config(testbed: &Testbed) -> String {
    format!(
        "[dispatch]\npin_directory = \"{}\"\n[[dispatch.service]]\nlisten = \"{SERVICE_ADDRESS}\"\n",
        testbed.pin_directory().join("dispatch").display()
    )
}

/// Asserts that each daemon's capabilities are exactly those that it retains by design, and that its systemd unit
/// grants them.
fn assert_unit_capabilities(fleet: &mut Fleet) {
    let daemons_and_units = [
        ("controller", "controller", Component::Controller),
        ("lb1", "lb", Component::Lb),
        ("agent-s1", "agent", Component::Agent),
    ];
    for (name, unit, daemon) in daemons_and_units {
        let retained_mask = retained_capability_mask(daemon);
        assert_eq!(read_effective_capabilities(fleet.daemon_process(name).unwrap().pid()), retained_mask, "{name}");
        let unit_mask = to_capability_mask(systemd_unit_capabilities(unit).unwrap().into_iter().map(parse_capability));
        assert_eq!(retained_mask & !unit_mask, 0, "{name} keeps more than its unit leaves it");
    }
}

/// Returns the state of server 1 from `coreward status`.
fn query_first_server_status(fleet: &Fleet, testbed: &Testbed) -> serde_json::Value {
    let status = fleet.query_status(testbed).unwrap();
    status["servers"].as_array().unwrap().iter().find(|server| server["name"] == "s1").unwrap().clone()
}

fn query_server_warnings(fleet: &Fleet, testbed: &Testbed) -> Vec<String> {
    let warnings: Vec<String> =
        serde_json::from_value(query_first_server_status(fleet, testbed)["warnings"].clone()).unwrap();
    // This warning is normal on a small machine.
    warnings.into_iter().filter(|warning| !warning.contains("receive queues are served by")).collect()
}

#[test]
fn daemons_work_with_only_the_capabilities_of_their_units() {
    skip_if!(find_missing_testbed_rights());
    let options = TestbedOptions { instance_name: "confined".to_owned(), server_count: 2, ..Default::default() };
    let testbed = Testbed::create(options).unwrap();
    let _nginx_servers: Vec<_> =
        testbed.server_numbers().into_iter().map(|n| testbed.start_nginx(n).unwrap()).collect();
    let _key_value_server = testbed.start_key_value_server(1, &["--workers", "2"]).unwrap();
    let options = TestbedFleetOptions {
        has_only_unit_capabilities: true,
        extra_agent_text: build_dispatch_config(&testbed),
        ..Default::default()
    };
    let mut fleet = Fleet::start(&testbed, options).unwrap();
    send_requests(&testbed, 20);

    assert_unit_capabilities(&mut fleet);
    // Workers' sockets are found, connections are steered to them, UDP requests are dispatched to them, and no daemon
    // warns.
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the agent dispatches to both workers", || {
        let dispatch_workers = query_first_server_status(&fleet, &testbed)["dispatched_services"][0]["workers"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        dispatch_workers.iter().filter(|worker| worker["eligible"] == true).count() == 2
    });
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the agent has no warnings", || {
        query_server_warnings(&fleet, &testbed).is_empty()
    });
    // Send more requests, because earlier connections may have arrived before the agent found the workers.
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "connections were steered", || {
        send_requests(&testbed, 2);
        query_first_server_status(&fleet, &testbed)["counters"]["steered"].as_u64().unwrap() > 0
    });
    // Agents may have to forward packets to a draining server, so they must resolve its address by ARP.
    let mut pool = fleet.server_pool().clone();
    pool.insert(2, ServerAdminState::Draining);
    fleet.set_server_pool(&testbed, pool).unwrap();
    wait_until_configuration_in_force(&fleet, &testbed);
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the agent has found the other server", || {
        query_server_warnings(&fleet, &testbed).is_empty()
    });
    // A new process takes over the pins, and detach removes them.
    for name in ["lb1", "agent-s1"] {
        fleet.upgrade_daemon(&testbed, name).unwrap();
    }
    fleet.wait_until_ready(&testbed).unwrap();
    send_requests(&testbed, 20);
}
