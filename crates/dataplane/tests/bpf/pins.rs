//! Tests of pin directories: one process at a time may change pins, readers create no pins, and programs of another pin
//! directory at the same device are noticed.

use coreward_dataplane::lb::connections::PinnedConnections;
use coreward_dataplane::lb::{LoadBalancer, Options, XdpMode, capture};
use coreward_dataplane::pins::{PinLock, remove_if_empty};
use coreward_dataplane::server::{ServerOptions, ServerPrograms};

use crate::support::network::{PinDirectory, VethPair};
use crate::support::server_env::{TestEnv, attach};
use crate::support::{missing_bpf_rights, skip_if};

#[test]
fn pin_directory_belongs_to_one_process() {
    skip_if!(missing_bpf_rights());
    let pins = PinDirectory::new();
    let claim = PinLock::new(&pins.path()).unwrap();
    let refused = PinLock::new(&pins.path()).unwrap_err().to_string();
    assert!(
        refused.contains("another process works with what is pinned there: expected it stopped first"),
        "{refused}"
    );
    drop(claim);
    let claim = PinLock::new(&pins.path().join("made")).unwrap();
    drop(claim);
    remove_if_empty(&pins.path()).unwrap();
    assert!(pins.path().join("made").exists());
    remove_if_empty(&pins.path().join("made")).unwrap();
    assert!(!pins.path().join("made").exists());

    let refused = PinLock::new(&std::env::temp_dir()).unwrap_err().to_string();
    assert!(refused.contains("expected a directory on a BPF file system"), "{refused}");
}

#[test]
fn read_only_commands_create_no_pins() {
    skip_if!(missing_bpf_rights());
    let pins = PinDirectory::new();
    for refused in [PinnedConnections::open(&pins.path()).unwrap_err(), capture::services(&pins.path()).unwrap_err()] {
        assert!(refused.to_string().starts_with("no load balancer has pinned anything in "), "{refused}");
    }
    assert_eq!(std::fs::read_dir(pins.path()).unwrap().count(), 0);
}

/// An agent whose `pin_directory` has changed finds the programs pinned in the former directory attached to its device.
/// If both stamped each packet, no connection could open.
#[test]
fn programs_pinned_elsewhere_are_not_replaced() {
    skip_if!(missing_bpf_rights());
    let (env, elsewhere) = (TestEnv::new(), PinDirectory::new());
    let options = ServerOptions {
        interface_index: env.pair.server_interface(),
        pin_directory: elsewhere.path(),
        sample_every_syn: false,
    };
    let attach_elsewhere = || env.pair.server.run_inside(|| ServerPrograms::attach(options.clone()));
    let refused = attach_elsewhere().unwrap_err().to_string();
    let named = format!("what is pinned in {} is at the interface of index ", env.pins.path().display());
    assert!(refused.starts_with(&named), "{refused}");
    assert_eq!(std::fs::read_dir(elsewhere.path()).unwrap().count(), 0);

    // A process with the same directory takes over. After the programs were removed, another directory works, too.
    drop(attach(&env.pair, &env.pins));
    env.pair.server.run_inside(|| env.programs.remove()).unwrap();
    let moved = env.pair.server.run_inside(|| ServerPrograms::attach(options.clone())).unwrap();
    env.pair.server.run_inside(|| moved.remove()).unwrap();
}

#[test]
fn load_balancer_pinned_elsewhere_is_named() {
    skip_if!(missing_bpf_rights());
    let attach = |pair: &VethPair, pins: &PinDirectory| {
        let mut lb = LoadBalancer::load(Options { pin_directory: Some(pins.path()), ..Options::default() })?;
        pair.server.run_inside(|| lb.attach("eth0", XdpMode::Auto))?;
        anyhow::Ok(lb)
    };
    // The devices of the two network namespaces have the same interface index.
    let machines = [(VethPair::new(), PinDirectory::new()), (VethPair::new(), PinDirectory::new())];
    assert_eq!(machines[0].0.server_interface(), machines[1].0.server_interface());
    let balancers = [0, 1].map(|number| attach(&machines[number].0, &machines[number].1).unwrap());
    let elsewhere = PinDirectory::new();
    for (pair, pins) in &machines {
        let refused = attach(pair, &elsewhere).unwrap_err().to_string();
        let named = format!("has the program of a load balancer that is pinned in {}: expected", pins.path().display());
        assert!(refused.contains(&named), "{refused}");
    }
    balancers.into_iter().for_each(|lb| lb.detach().unwrap());
    attach(&machines[0].0, &elsewhere).unwrap().detach().unwrap();
}
