//! Runs the commands of docs/tutorial.md, docs/routed.md and docs/dual-stack.md unchanged.

use std::collections::BTreeMap;
use std::process::Command;

use coreward_testbed::doc_runner::{DocumentMachine, parse_shell_blocks};
use coreward_testbed::{Testbed, TestbedOptions, find_missing_testbed_rights, skip_if};

const UNITS_AND_MACHINES: [(&str, &str); 3] = [
    ("coreward-controller", include_str!("../../../../packaging/systemd/coreward-controller.service")),
    ("coreward-lb", include_str!("../../../../packaging/systemd/coreward-lb.service")),
    ("coreward-agent", include_str!("../../../../packaging/systemd/coreward-agent.service")),
];

/// Removes the addresses and routes of the VIP from all hosts. The commands in the documents add them.
fn remove_vip_addresses_and_routes(testbed: &Testbed) {
    let run_ip = |namespace, arguments: &[&str]| {
        let mut command = Command::new("ip");
        command.args(arguments);
        testbed.run_command(namespace, command).unwrap();
    };
    for number in testbed.server_numbers() {
        run_ip(testbed.server(number).unwrap(), &["address", "delete", "10.200.0.1/32", "dev", "lo"]);
    }
    run_ip(testbed.client(), &["route", "delete", "10.200.0.0/24"]);
    // This is Debian's default.
    testbed.client().set_sysctls(&[("ipv4/fib_multipath_hash_policy", "0")]).unwrap();
}

/// Runs the shell blocks in `document` without changes, each on the machines that the block names.
fn run_shell_blocks(testbed: &Testbed, document: &str) {
    remove_vip_addresses_and_routes(testbed);
    let mut hosts_by_name =
        vec![("client".to_owned(), testbed.client()), ("controller".to_owned(), testbed.controller())];
    for number in testbed.load_balancer_numbers() {
        hosts_by_name.push((format!("lb{number}"), testbed.load_balancer(number).unwrap()));
    }
    for number in testbed.server_numbers() {
        hosts_by_name.push((format!("s{number}"), testbed.server(number).unwrap()));
    }
    for (name, _) in &hosts_by_name {
        let units_directory = testbed.directory().join(format!("machine-{name}/var/lib/units"));
        std::fs::create_dir_all(&units_directory).unwrap();
        for (unit, text) in UNITS_AND_MACHINES {
            std::fs::write(units_directory.join(format!("{unit}.service")), text).unwrap();
        }
    }
    let machines: BTreeMap<String, DocumentMachine> = hosts_by_name
        .into_iter()
        .map(|(name, namespace)| (name.clone(), DocumentMachine::start(testbed, &name, namespace).unwrap()))
        .collect();
    let shell_blocks = parse_shell_blocks(document).unwrap();
    assert!(shell_blocks.len() > 10, "{shell_blocks:?}");
    for (number, block) in shell_blocks.iter().enumerate() {
        for name in &block.machine_names {
            let log_path = testbed.directory().join(format!("block-{number}-{name}.log"));
            let machine = machines.get(name.as_str());
            let machine = machine.unwrap_or_else(|| panic!("line {}: there is no machine {name}", block.line_number));
            let block_output = machine.run_shell_block(block, &log_path).unwrap_or_else(|error| panic!("{error:#}"));
            println!("== line {}, {name}\n{block_output}", block.line_number);
            assert!(!block_output.contains("not every listening socket"), "the agent finds nginx's workers");
        }
    }
}

#[test]
fn commands_in_the_tutorial_succeed() {
    skip_if!(find_missing_testbed_rights());
    let options = TestbedOptions {
        instance_name: "tutorial".to_owned(),
        server_count: 2,
        load_balancer_count: 2,
        client_address_count: 1,
        ..TestbedOptions::default()
    };
    run_shell_blocks(&Testbed::create(options).unwrap(), include_str!("../../../../docs/tutorial.md"));
}

/// Runs the shell blocks of `document` in a testbed with two servers behind a router.
fn run_shell_blocks_with_router(instance: &str, document: &str) {
    let options = TestbedOptions {
        instance_name: instance.to_owned(),
        server_count: 2,
        client_address_count: 1,
        has_server_router: true,
        ..TestbedOptions::default()
    };
    run_shell_blocks(&Testbed::create(options).unwrap(), document);
}

#[test]
fn commands_for_routed_servers_succeed() {
    skip_if!(find_missing_testbed_rights());
    run_shell_blocks_with_router("routedtutorial", include_str!("../../../../docs/routed.md"));
}

#[test]
fn commands_for_a_dual_stack_network_succeed() {
    skip_if!(find_missing_testbed_rights());
    run_shell_blocks_with_router("dualtutorial", include_str!("../../../../docs/dual-stack.md"));
}
