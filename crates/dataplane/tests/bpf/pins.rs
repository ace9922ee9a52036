//! Tests of pin directories. One process at a time may change pins, and readers create no pins. Programs at the same
//! device that are pinned in another directory are detected.

use coreward_dataplane::lb::connections::PinnedConnectionTable;
use coreward_dataplane::lb::{LoadBalancer, LoadBalancerOptions, XdpMode, capture};
use coreward_dataplane::pins::{PinDirectoryLock, remove_pin_directory_if_empty};
use coreward_dataplane::server::{ServerProgramOptions, ServerPrograms};

use crate::support::network::{PinDirectory, VethPair};
use crate::support::server_env::{ServerTestEnv, attach_programs};
use crate::support::{missing_bpf_rights, skip_if};

#[test]
fn pin_directory_is_locked_by_one_process() {
    skip_if!(missing_bpf_rights());
    let pins = PinDirectory::new();
    let pin_lock = PinDirectoryLock::new(&pins.path()).unwrap();
    let lock_error = PinDirectoryLock::new(&pins.path()).unwrap_err().to_string();
    assert!(
        lock_error.contains("another process works with what is pinned there: expected it stopped first"),
        "{lock_error}"
    );
    drop(pin_lock);
    let pin_lock = PinDirectoryLock::new(&pins.path().join("made")).unwrap();
    drop(pin_lock);
    remove_pin_directory_if_empty(&pins.path()).unwrap();
    assert!(pins.path().join("made").exists());
    remove_pin_directory_if_empty(&pins.path().join("made")).unwrap();
    assert!(!pins.path().join("made").exists());

    let lock_error = PinDirectoryLock::new(&std::env::temp_dir()).unwrap_err().to_string();
    assert!(lock_error.contains("expected a directory on a BPF file system"), "{lock_error}");
}

#[test]
fn read_only_commands_create_no_pins() {
    skip_if!(missing_bpf_rights());
    let pins = PinDirectory::new();
    for open_error in [
        PinnedConnectionTable::open(&pins.path()).unwrap_err(),
        capture::pinned_services_with_names(&pins.path()).unwrap_err(),
    ] {
        assert!(open_error.to_string().starts_with("no load balancer has pinned anything in "), "{open_error}");
    }
    assert_eq!(std::fs::read_dir(pins.path()).unwrap().count(), 0);
}

/// An agent whose `pin_directory` has changed finds programs at its device that are pinned in the former directory. If
/// the former and the new programs both stamped each packet, no connection could open.
#[test]
fn programs_pinned_elsewhere_are_not_replaced() {
    skip_if!(missing_bpf_rights());
    let (env, other_pins) = (ServerTestEnv::new(), PinDirectory::new());
    let options = ServerProgramOptions {
        interface_index: env.veth_pair.server_interface_index(),
        pin_directory: other_pins.path(),
        sample_every_syn: false,
    };
    let attach_elsewhere = || env.veth_pair.server.run_in_namespace(|| ServerPrograms::attach(options.clone()));
    let attach_error = attach_elsewhere().unwrap_err().to_string();
    let expected_error_start = format!("what is pinned in {} is at the interface of index ", env.pins.path().display());
    assert!(attach_error.starts_with(&expected_error_start), "{attach_error}");
    assert_eq!(std::fs::read_dir(other_pins.path()).unwrap().count(), 0);

    // A process with the same directory takes over. After the programs were removed, another directory also works.
    drop(attach_programs(&env.veth_pair, &env.pins));
    env.veth_pair.server.run_in_namespace(|| env.programs.detach_and_unpin()).unwrap();
    let programs_with_new_pins =
        env.veth_pair.server.run_in_namespace(|| ServerPrograms::attach(options.clone())).unwrap();
    env.veth_pair.server.run_in_namespace(|| programs_with_new_pins.detach_and_unpin()).unwrap();
}

#[test]
fn load_balancer_pinned_in_another_directory_is_reported() {
    skip_if!(missing_bpf_rights());
    let attach_balancer = |veth_pair: &VethPair, pins: &PinDirectory| {
        let mut lb = LoadBalancer::load(LoadBalancerOptions {
            pin_directory: Some(pins.path()),
            ..LoadBalancerOptions::default()
        })?;
        veth_pair.server.run_in_namespace(|| lb.attach("eth0", XdpMode::Auto))?;
        anyhow::Ok(lb)
    };
    // The devices of the two network namespaces have the same interface index.
    let hosts_and_pins = [(VethPair::new(), PinDirectory::new()), (VethPair::new(), PinDirectory::new())];
    assert_eq!(hosts_and_pins[0].0.server_interface_index(), hosts_and_pins[1].0.server_interface_index());
    let balancers = [0, 1].map(|number| attach_balancer(&hosts_and_pins[number].0, &hosts_and_pins[number].1).unwrap());
    let unused_pins = PinDirectory::new();
    for (veth_pair, pins) in &hosts_and_pins {
        let attach_error = attach_balancer(veth_pair, &unused_pins).unwrap_err().to_string();
        let expected_message =
            format!("has the program of a load balancer that is pinned in {}: expected", pins.path().display());
        assert!(attach_error.contains(&expected_message), "{attach_error}");
    }
    balancers.into_iter().for_each(|lb| lb.detach().unwrap());
    attach_balancer(&hosts_and_pins[0].0, &unused_pins).unwrap().detach().unwrap();
}
