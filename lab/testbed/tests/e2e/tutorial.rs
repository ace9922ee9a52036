//! Runs the commands of docs/tutorial.md, docs/routed.md and docs/dual-stack.md unchanged.

use std::collections::BTreeMap;
use std::process::Command;

use coreward_testbed::doc_runner::{Host, parse_shell_blocks};
use coreward_testbed::{Testbed, TestbedOptions, missing_testbed_rights, skip_if};

const UNITS: [(&str, &str); 3] = [
    ("coreward-controller", include_str!("../../../../packaging/systemd/coreward-controller.service")),
    ("coreward-lb", include_str!("../../../../packaging/systemd/coreward-lb.service")),
    ("coreward-agent", include_str!("../../../../packaging/systemd/coreward-agent.service")),
];

/// Removes the VIP's addresses and routes, which the documents' commands add, from all hosts.
fn remove_vip(testbed: &Testbed) {
    let ip = |namespace, arguments: &[&str]| {
        let mut command = Command::new("ip");
        command.args(arguments);
        testbed.run(namespace, command).unwrap();
    };
    for number in testbed.server_numbers() {
        ip(testbed.server(number).unwrap(), &["address", "delete", "10.200.0.1/32", "dev", "lo"]);
    }
    ip(testbed.client(), &["route", "delete", "10.200.0.0/24"]);
    // Debian's default.
    testbed.client().set_sysctls(&[("ipv4/fib_multipath_hash_policy", "0")]).unwrap();
}

/// Runs the shell blocks of `document` without changes, each on the machines that it names.
fn run_blocks(testbed: &Testbed, document: &str) {
    remove_vip(testbed);
    let mut hosts = vec![("client".to_owned(), testbed.client()), ("controller".to_owned(), testbed.controller())];
    for number in testbed.load_balancer_numbers() {
        hosts.push((format!("lb{number}"), testbed.load_balancer(number).unwrap()));
    }
    for number in testbed.server_numbers() {
        hosts.push((format!("s{number}"), testbed.server(number).unwrap()));
    }
    for (name, _) in &hosts {
        let units = testbed.directory().join(format!("machine-{name}/var/lib/units"));
        std::fs::create_dir_all(&units).unwrap();
        for (unit, text) in UNITS {
            std::fs::write(units.join(format!("{unit}.service")), text).unwrap();
        }
    }
    let machines: BTreeMap<String, Host> = hosts
        .into_iter()
        .map(|(name, namespace)| (name.clone(), Host::start(testbed, &name, namespace).unwrap()))
        .collect();
    let blocks = parse_shell_blocks(document).unwrap();
    assert!(blocks.len() > 10, "{blocks:?}");
    for (number, block) in blocks.iter().enumerate() {
        for name in &block.machines {
            let log = testbed.directory().join(format!("block-{number}-{name}.log"));
            let machine = machines.get(name.as_str());
            let machine = machine.unwrap_or_else(|| panic!("line {}: there is no machine {name}", block.line));
            let printed = machine.run(block, &log).unwrap_or_else(|error| panic!("{error:#}"));
            println!("== line {}, {name}\n{printed}", block.line);
            assert!(!printed.contains("not every listening socket"), "the agent finds nginx's workers");
        }
    }
}

#[test]
fn commands_of_the_tutorial_work() {
    skip_if!(missing_testbed_rights());
    let options = TestbedOptions {
        instance: "tutorial".to_owned(),
        servers: 2,
        load_balancers: 2,
        client_addresses: 1,
        ..TestbedOptions::default()
    };
    run_blocks(&Testbed::create(options).unwrap(), include_str!("../../../../docs/tutorial.md"));
}

/// Runs the shell blocks of a document about two servers behind a router.
fn run_routed(instance: &str, document: &str) {
    let options = TestbedOptions {
        instance: instance.to_owned(),
        servers: 2,
        client_addresses: 1,
        routed_servers: true,
        ..TestbedOptions::default()
    };
    run_blocks(&Testbed::create(options).unwrap(), document);
}

#[test]
fn commands_for_routed_servers_work() {
    skip_if!(missing_testbed_rights());
    run_routed("routedtutorial", include_str!("../../../../docs/routed.md"));
}

#[test]
fn commands_for_a_dual_stack_network_work() {
    skip_if!(missing_testbed_rights());
    run_routed("dualtutorial", include_str!("../../../../docs/dual-stack.md"));
}
