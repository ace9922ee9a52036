//! `coreward dispatch` in the agent: requests to a key-value server, from the agent's configuration file to `coreward
//! status`.

use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::fleet::{Fleet, FleetOptions, operator_command};
use coreward_testbed::{TIMEOUT, Testbed, missing_testbed_rights, skip_if};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::eventually;
use crate::support::load::{report, start_load};

/// Returns the section `[dispatch]` of the agent's configuration file.
fn dispatch(testbed: &Testbed, policy: &str) -> String {
    let pins = testbed.pin_directory().join("dispatch");
    let service =
        format!("listen = \"{SERVICE_ADDRESS}\"\npolicy = \"{policy}\"\nrequest_id = {{ offset = 4, bytes = 4 }}\n");
    format!("[dispatch]\npin_directory = \"{}\"\n[[dispatch.service]]\n{service}", pins.display())
}

/// Returns the services that the server dispatches, from `coreward status`.
fn dispatch_status(fleet: &Fleet, testbed: &Testbed) -> Value {
    fleet.status(testbed).unwrap()["servers"][0]["dispatch"].clone()
}

fn sum(dispatched: &Value, count: &str) -> u64 {
    let workers = dispatched[0]["workers"].as_array().unwrap();
    workers.iter().map(|worker| worker[count].as_u64().unwrap()).sum()
}

fn eligible_workers(dispatched: &Value) -> usize {
    let workers = dispatched[0]["workers"].as_array().into_iter().flatten();
    workers.filter(|worker| worker["eligible"] == true).count()
}

#[test]
fn agent_dispatches_by_its_file() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = Testbed::create_direct("tdispatch")?;
    let server = ["--workers", "4", "--paced", "--service-us", "GET=300"];
    let server = testbed.start_key_value_server(1, &[&server[..], &["--receive-buffer", "16000000"]].concat())?;
    let more = dispatch(&testbed, "jsq");
    let mut fleet = Fleet::start(&testbed, FleetOptions { agent_text: more, ..FleetOptions::default() })?;
    // The load bypasses the load balancer.
    eventually(*TIMEOUT, "four workers get requests", || eligible_workers(&dispatch_status(&fleet, &testbed)) == 4);
    let load = report(start_load(&testbed, "--rate 2000 --seconds 2 --warm-up 0 --timeout 20")?)?;
    assert_eq!(load["lost"], 0, "{load}");
    eventually(*TIMEOUT, "the agent reports that all are answered", || {
        sum(&dispatch_status(&fleet, &testbed), "completed") == load["requests"].as_u64().unwrap()
    });
    let reported = dispatch_status(&fleet, &testbed);
    assert_eq!((&reported[0]["listen"], &reported[0]["policy"]), (&SERVICE_ADDRESS.to_string().into(), &"jsq".into()));
    assert_eq!(
        (sum(&reported, "outstanding"), sum(&reported, "abandoned"), sum(&reported, "queued")),
        (0, 0, 0),
        "{reported}"
    );
    assert_eq!(sum(&reported, "dispatched"), sum(&reported, "completed"));
    let pids: Vec<_> = server.worker_pids();
    let workers = reported[0]["workers"].as_array().unwrap();
    assert!(
        workers.iter().all(|worker| pids.contains(&(worker["pid"].as_u64().unwrap() as u32))),
        "{reported} {pids:?}"
    );
    let text = operator_command(&testbed, &["status"])?;
    let text = String::from_utf8(testbed.run(testbed.controller(), text)?.stdout)?;
    assert!(text.contains(&format!("dispatch of {SERVICE_ADDRESS} at s1: jsq\n")), "{text}");

    check_reload_restart_and_detach(&testbed, &mut fleet)
}

/// Tests a reload by SIGHUP, a restart of the agent, and the detachment of the dispatch.
fn check_reload_restart_and_detach(testbed: &Testbed, fleet: &mut Fleet) -> anyhow::Result<()> {
    let file = testbed.directory().join("agent-s1.toml");
    let before = std::fs::read_to_string(&file)?;
    let completed = sum(&dispatch_status(fleet, testbed), "completed");
    std::fs::write(&file, before.replace("\"jsq\"", "\"rr\""))?;
    fleet.daemon("agent-s1")?.signal(Signal::SIGHUP)?;
    eventually(*TIMEOUT, "the policy has changed", || dispatch_status(fleet, testbed)[0]["policy"] == "rr");
    assert_eq!(sum(&dispatch_status(fleet, testbed), "completed"), completed, "the counts continue");
    // An invalid file changes nothing.
    std::fs::write(&file, before.replace("\"jsq\"", "\"jsk\""))?;
    fleet.daemon("agent-s1")?.signal(Signal::SIGHUP)?;
    let load = report(start_load(testbed, "--rate 1000 --seconds 1 --warm-up 0 --timeout 20")?)?;
    assert_eq!(load["lost"], 0, "{load}");
    let expected = completed + load["requests"].as_u64().unwrap();
    eventually(*TIMEOUT, "they are counted", || sum(&dispatch_status(fleet, testbed), "completed") == expected);
    assert_eq!(dispatch_status(fleet, testbed)[0]["policy"], "rr");

    // Another agent process takes over the ledger (its file is rewritten).
    fleet.upgrade(testbed, "agent-s1")?;
    eventually(*TIMEOUT, "the new agent dispatches", || dispatch_status(fleet, testbed)[0]["policy"] == "jsq");
    assert_eq!(
        (eligible_workers(&dispatch_status(fleet, testbed)), sum(&dispatch_status(fleet, testbed), "completed")),
        (4, expected)
    );

    // Without [dispatch] the kernel selects the worker, and no state remains.
    std::fs::write(&file, before.split("[dispatch]").next().unwrap())?;
    fleet.daemon("agent-s1")?.signal(Signal::SIGHUP)?;
    eventually(*TIMEOUT, "nothing is dispatched", || {
        dispatch_status(fleet, testbed).as_array().is_some_and(Vec::is_empty)
    });
    assert!(!testbed.pin_directory().join("dispatch").exists());
    let load = report(start_load(testbed, "--rate 1000 --seconds 1 --warm-up 0 --timeout 20")?)?;
    assert_eq!(load["lost"], 0, "{load}");
    Ok(())
}
