//! Test of `coreward dispatch` in the agent, with requests to a key-value server. It covers the way from the agent's
//! configuration file to `coreward status`.

use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::fleet::{Fleet, TestbedFleetOptions, build_operator_command};
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, Testbed, find_missing_testbed_rights, skip_if};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::assert_eventually;
use crate::support::load::{start_load_generator, wait_for_load_report};

fn build_dispatch_config(testbed: &Testbed, policy: &str) -> String {
    let pin_directory = testbed.pin_directory().join("dispatch");
    let service_config =
        format!("listen = \"{SERVICE_ADDRESS}\"\npolicy = \"{policy}\"\nrequest_id = {{ offset = 4, bytes = 4 }}\n");
    format!("[dispatch]\npin_directory = \"{}\"\n[[dispatch.service]]\n{service_config}", pin_directory.display())
}

/// Returns the status of the dispatched services on the server, from `coreward status`.
fn query_dispatch_status(fleet: &Fleet, testbed: &Testbed) -> Value {
    fleet.query_status(testbed).unwrap()["servers"][0]["dispatched_services"].clone()
}

fn sum_over_workers(dispatch_status: &Value, counter_name: &str) -> u64 {
    let workers = dispatch_status[0]["workers"].as_array().unwrap();
    workers.iter().map(|worker| worker[counter_name].as_u64().unwrap()).sum()
}

fn count_eligible_workers(dispatch_status: &Value) -> usize {
    let workers = dispatch_status[0]["workers"].as_array().into_iter().flatten();
    workers.filter(|worker| worker["eligible"] == true).count()
}

/// Asserts that exactly one service is dispatched, and that the workers `worker_pids` have answered all its requests.
fn assert_workers_answered_all_requests(dispatched_services: &Value, worker_pids: &[u32]) {
    assert_eq!(
        (&dispatched_services[0]["listen"], &dispatched_services[0]["policy"]),
        (&SERVICE_ADDRESS.to_string().into(), &"jsq".into())
    );
    assert_eq!(
        (
            sum_over_workers(dispatched_services, "outstanding"),
            sum_over_workers(dispatched_services, "abandoned"),
            sum_over_workers(dispatched_services, "queued")
        ),
        (0, 0, 0),
        "{dispatched_services}"
    );
    assert_eq!(sum_over_workers(dispatched_services, "dispatched"), sum_over_workers(dispatched_services, "completed"));
    let status_workers = dispatched_services[0]["workers"].as_array().unwrap();
    assert!(
        status_workers.iter().all(|worker| worker_pids.contains(&(worker["pid"].as_u64().unwrap() as u32))),
        "{dispatched_services} {worker_pids:?}"
    );
}

/// Sends requests to the server, asserts that it answers all of them, and returns the load generator's report.
fn run_load_without_loss(testbed: &Testbed, load_options: &str) -> anyhow::Result<Value> {
    let load_report = wait_for_load_report(start_load_generator(testbed, load_options)?)?;
    assert_eq!(load_report["lost"], 0, "{load_report}");
    Ok(load_report)
}

#[test]
fn agent_applies_its_dispatch_configuration() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_without_load_balancing("tdispatch")?;
    let server_options = ["--workers", "4", "--paced", "--service-us", "GET=300"];
    let server =
        testbed.start_key_value_server(1, &[&server_options[..], &["--receive-buffer", "16000000"]].concat())?;
    let agent_config = build_dispatch_config(&testbed, "jsq");
    let mut fleet = Fleet::start(
        &testbed,
        TestbedFleetOptions { extra_agent_text: agent_config, ..TestbedFleetOptions::default() },
    )?;
    // The load generator sends requests to the server directly, without the load balancer.
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "four workers get requests", || {
        count_eligible_workers(&query_dispatch_status(&fleet, &testbed)) == 4
    });
    let load_report = run_load_without_loss(&testbed, "--rate 2000 --seconds 2 --warm-up 0 --timeout 20")?;
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the agent reports that all are answered", || {
        sum_over_workers(&query_dispatch_status(&fleet, &testbed), "completed")
            == load_report["requests"].as_u64().unwrap()
    });
    let dispatched_services = query_dispatch_status(&fleet, &testbed);
    assert_workers_answered_all_requests(&dispatched_services, &server.worker_pids());
    let status_command = build_operator_command(&testbed, &["status"])?;
    let text = String::from_utf8(testbed.run_command(testbed.controller(), status_command)?.stdout)?;
    assert!(text.contains(&format!("dispatch of {SERVICE_ADDRESS} at s1: jsq\n")), "{text}");

    check_reload_restart_and_detach(&testbed, &mut fleet)
}

/// Writes a new configuration file for the agent of server 1, and makes the agent reload it.
fn reload_agent_config(testbed: &Testbed, fleet: &mut Fleet, config: &str) -> anyhow::Result<()> {
    std::fs::write(testbed.directory().join("agent-s1.toml"), config)?;
    fleet.daemon_process("agent-s1")?.send_signal(Signal::SIGHUP)
}

/// Tests a reload of the agent by SIGHUP, a restart of the agent, and the detachment of the dispatch program.
fn check_reload_restart_and_detach(testbed: &Testbed, fleet: &mut Fleet) -> anyhow::Result<()> {
    let config_before = std::fs::read_to_string(testbed.directory().join("agent-s1.toml"))?;
    let completed_count_before = sum_over_workers(&query_dispatch_status(fleet, testbed), "completed");
    reload_agent_config(testbed, fleet, &config_before.replace("\"jsq\"", "\"rr\""))?;
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the policy has changed", || {
        query_dispatch_status(fleet, testbed)[0]["policy"] == "rr"
    });
    assert_eq!(
        sum_over_workers(&query_dispatch_status(fleet, testbed), "completed"),
        completed_count_before,
        "the counts continue"
    );
    // An invalid file changes nothing.
    reload_agent_config(testbed, fleet, &config_before.replace("\"jsq\"", "\"jsk\""))?;
    let load_report = run_load_without_loss(testbed, "--rate 1000 --seconds 1 --warm-up 0 --timeout 20")?;
    let expected_completed_count = completed_count_before + load_report["requests"].as_u64().unwrap();
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "they are counted", || {
        sum_over_workers(&query_dispatch_status(fleet, testbed), "completed") == expected_completed_count
    });
    assert_eq!(query_dispatch_status(fleet, testbed)[0]["policy"], "rr");

    // A new agent process takes over the request counters. Its start rewrites the configuration file.
    fleet.upgrade_daemon(testbed, "agent-s1")?;
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "the new agent dispatches", || {
        query_dispatch_status(fleet, testbed)[0]["policy"] == "jsq"
    });
    assert_eq!(
        (
            count_eligible_workers(&query_dispatch_status(fleet, testbed)),
            sum_over_workers(&query_dispatch_status(fleet, testbed), "completed")
        ),
        (4, expected_completed_count)
    );

    // Without [dispatch] the kernel selects the worker, and no state remains.
    reload_agent_config(testbed, fleet, config_before.split("[dispatch]").next().unwrap())?;
    assert_eventually(*DEFAULT_WAIT_TIMEOUT, "nothing is dispatched", || {
        query_dispatch_status(fleet, testbed).as_array().is_some_and(Vec::is_empty)
    });
    assert!(!testbed.pin_directory().join("dispatch").exists());
    run_load_without_loss(testbed, "--rate 1000 --seconds 1 --warm-up 0 --timeout 20").map(drop)
}
