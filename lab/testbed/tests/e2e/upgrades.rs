//! Daemons are replaced under load, as in each row of the table in docs/deployment.md.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coreward_dataplane::mmap_array::MmapArray;
use coreward_intf as intf;
use coreward_model::consistency::ConsistencyMode;
use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::fleet::TestbedFleetOptions;
use coreward_testbed::stream_connections::client::{StreamClientProcess, StreamWorkload};
use coreward_testbed::{TestbedOptions, find_missing_testbed_rights, skip_if};
use libbpf_rs::MapHandle;
use zerocopy::{FromBytes, IntoBytes};

use crate::support::{
    FleetTestEnv, assert_eventually, assert_streams_unbroken, sleep_ms, wait_until_configuration_in_force,
};

const SERVER_COUNT: u16 = 3;

fn start_env(instance: &str, load_balancer_count: u16, consistency: ConsistencyMode) -> FleetTestEnv {
    let testbed_options = TestbedOptions {
        instance_name: instance.to_owned(),
        server_count: SERVER_COUNT,
        load_balancer_count,
        ..TestbedOptions::default()
    };
    FleetTestEnv::start(testbed_options, TestbedFleetOptions { consistency, ..TestbedFleetOptions::default() })
}

fn agent_names() -> impl Iterator<Item = String> {
    (1..=SERVER_COUNT).map(|number| format!("agent-s{number}"))
}

/// Stores an unknown layout version in a daemon's pinned map `state`. The map's values have the type `T`.
fn store_unknown_layout_version<T: FromBytes + IntoBytes>(state: &Path) {
    let mapped_state = MmapArray::<T>::new(MapHandle::from_pinned_path(state).unwrap()).unwrap();
    // The first word of both types is the version (bpf/include/intf.h).
    mapped_state.store(0, 99);
}

impl FleetTestEnv {
    fn pin_path(&self, daemon: &str) -> PathBuf {
        match daemon.strip_prefix("lb") {
            Some(number) => self.testbed.load_balancer_pin_directory(number.parse().unwrap()),
            None => self.testbed.pin_directory().join(daemon),
        }
    }

    /// Starts a stream client that uses only the source addresses with indices in `addresses`. Two clients cannot bind
    /// the same ports.
    fn start_streams_from(&self, addresses: Range<u16>) -> StreamClientProcess {
        let stream_workload = StreamWorkload::endless(150.0);
        self.testbed.start_stream_client_at_address(SERVICE_ADDRESS, addresses, &stream_workload, None).unwrap()
    }

    /// Restarts a daemon whose pins have an unknown layout version, and waits until the daemon has replaced its pins.
    fn restart_with_other_layout_version(&mut self, daemon: &str) {
        let pin_directory = self.pin_path(daemon);
        self.fleet.kill_daemon(daemon).unwrap();
        let find_pinned_problem = || match daemon.starts_with("lb") {
            true => coreward_dataplane::lb::find_takeover_problem(&pin_directory),
            false => coreward_dataplane::server::find_takeover_problem(&pin_directory).unwrap(),
        };
        match daemon.starts_with("lb") {
            true => store_unknown_layout_version::<intf::lb_state>(&pin_directory.join("lb/state")),
            false => store_unknown_layout_version::<intf::server_state>(&pin_directory.join("server/state")),
        }
        assert!(find_pinned_problem().is_some());
        self.fleet.restart_daemon(&self.testbed, daemon).unwrap();
        assert_eventually(Duration::from_secs(60), "the new version is at work", || find_pinned_problem().is_none());
    }
}

#[test]
fn pins_with_same_layout_are_reused() {
    skip_if!(find_missing_testbed_rights());
    let mut env = start_env("upsame", 1, ConsistencyMode::Stateless);
    let stream_client = env.start_streams(150.0);
    sleep_ms(1_000);
    for daemon in ["controller".to_owned(), "lb1".to_owned()].into_iter().chain(agent_names()) {
        env.fleet.upgrade_daemon(&env.testbed, &daemon).unwrap();
        sleep_ms(1_000);
    }
    env.assert_counter_within_reset_count("broadcast");
    assert_streams_unbroken(stream_client);
}

#[test]
fn pins_with_other_layout_are_replaced_when_new_pins_are_ready() {
    skip_if!(find_missing_testbed_rights());
    for consistency in [ConsistencyMode::Stateless, ConsistencyMode::Stateful] {
        let mut env = start_env("uplayout", 1, consistency);
        let stream_client = env.start_streams(150.0);
        sleep_ms(1_500);
        env.restart_with_other_layout_version("lb1");
        sleep_ms(500);
        agent_names().for_each(|agent| env.restart_with_other_layout_version(&agent));
        wait_until_configuration_in_force(&env.fleet, &env.testbed);
        assert_streams_unbroken(stream_client);
    }
}

/// Tests the change from an actual older version and back. `make test-upgrade` builds the older version and sets
/// COREWARD_OLD to its path.
#[test]
#[ignore = "needs an older version's binary: make test-upgrade"]
fn connections_survive_upgrade_and_downgrade_between_versions() {
    let old_binary = PathBuf::from(std::env::var_os("COREWARD_OLD").expect("COREWARD_OLD: the older version's binary"));
    let mut env = start_env("upreal", 2, ConsistencyMode::Stateless);
    let daemon_names: Vec<String> =
        ["controller", "lb1", "lb2"].map(str::to_owned).into_iter().chain(agent_names()).collect();
    // Start all daemons with the older version, so that their pins are of that version, too.
    for daemon in &daemon_names {
        restart_without_pins(&mut env, daemon, Some(&old_binary));
    }
    env.fleet.wait_until_ready(&env.testbed).unwrap();
    env.testbed.route_vips_to_load_balancers(&[1, 2]).unwrap();

    println!("== up, one after the other");
    let stream_client = env.start_streams_from(0..2);
    for daemon in &daemon_names {
        sleep_ms(1_500);
        env.fleet.restart_daemon_with_binary(&env.testbed, daemon, None).unwrap();
        env.fleet.wait_until_ready(&env.testbed).unwrap();
        println!("{daemon}: of the newer version");
    }
    sleep_ms(3_000);
    assert_streams_unbroken(stream_client);

    println!("== down, one after the other");
    let stream_client = env.start_streams_from(2..4);
    for daemon in &daemon_names {
        sleep_ms(1_500);
        let replacement_result = env.fleet.restart_daemon_with_binary(&env.testbed, daemon, Some(&old_binary));
        if let (Err(error), Some(number)) = (replacement_result, daemon.strip_prefix("lb")) {
            println!("{daemon}: {error:#}");
            restart_without_pins_while_other_carries_traffic(&mut env, number.parse().unwrap());
        }
        env.fleet.wait_until_ready(&env.testbed).unwrap();
        println!("{daemon}: of the older version");
    }
    sleep_ms(3_000);
    assert_streams_unbroken(stream_client);
}

/// Restarts one of the two load balancers without its pinned BPF objects. Meanwhile, the other load balancer carries
/// the traffic, as in docs/deployment.md.
fn restart_without_pins_while_other_carries_traffic(env: &mut FleetTestEnv, load_balancer: u16) {
    let daemon = format!("lb{load_balancer}");
    let other_load_balancers: Vec<u16> = [1, 2].into_iter().filter(|other| *other != load_balancer).collect();
    env.testbed.route_vips_to_load_balancers(&other_load_balancers).unwrap();
    sleep_ms(500);
    std::fs::remove_dir_all(env.pin_path(&daemon)).unwrap();
    env.fleet.restart_daemon(&env.testbed, &daemon).unwrap();
    env.fleet.wait_until_ready(&env.testbed).unwrap();
    env.testbed.route_vips_to_load_balancers(&[1, 2]).unwrap();
}

/// Restarts a daemon without its pinned BPF objects.
fn restart_without_pins(env: &mut FleetTestEnv, daemon: &str, binary: Option<&Path>) {
    let pin_directory = env.pin_path(daemon);
    // Ignore an error, because the binary may reject pins of the other version.
    let _ = env.fleet.restart_daemon_with_binary(&env.testbed, daemon, binary);
    let _ = env.fleet.kill_daemon(daemon);
    for subdirectory in ["lb", "server", "steer"] {
        if let Err(error) = std::fs::remove_dir_all(pin_directory.join(subdirectory)) {
            assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{}: {error}", pin_directory.display());
        }
    }
    if daemon == "controller" {
        let store_path = env.testbed.directory().join("controller.redb");
        std::fs::remove_file(store_path).unwrap();
    }
    env.fleet.restart_daemon(&env.testbed, daemon).unwrap();
}
