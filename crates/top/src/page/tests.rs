use coreward_api::types::{Loads, Status};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use serde_json::{Value, json};

use super::*;
use crate::model::ControllerAnswer;
use crate::terminal::page_text;

fn sample_server_json(number: usize, state: &str) -> Value {
    json!({
        "name": format!("s{number}"), "id": number, "address": "10.2.0.1", "state": state,
        "state_reason": if state == "draining" { "by `coreward drain`" } else { "" }, "state_for_ms": 17,
        "report_state": "fresh", "core_loads": [], "report_age_ms": 40, "open_connections": 9, "rss": null,
        "rss_matched_syns": 0, "rss_mismatched_syns": 0,
        "warnings": if number == 2 { vec!["aRFS is on"] } else { vec![] }, "weight": 1, "capacity": 4.0,
        "configuration_generation": 3, "counters": {}, "dispatched_services": [],
    })
}

fn sample_status(server_count: usize) -> Status {
    let sample_server_state = |number: usize| if number == 3 { "draining" } else { "active" };
    let servers: Vec<Value> =
        (1..=server_count).map(|number| sample_server_json(number, sample_server_state(number))).collect();
    let member =
        json!({"server": "s1", "state": "active", "state_reason": "", "state_for_ms": null, "health_checks": []});
    serde_json::from_value(json!({
        "configuration_generation": 3, "report_interval_ms": 100, "accepted_reports": 1, "rejected_reports": {},
        "services": [{
            "name": "web", "address": "10.200.0.1:80/tcp", "policy": "crossrss", "consistency": "stateless",
            "timestamps": "server", "bucket_count": 1024, "table_generation": 77, "table_age_ms": 5, "servers": ["s1"],
            "members": [member], "health_check_kind": null,
            "when_all_down": "fail-open", "failing_open": false, "rss_groups": [], "warnings": [],
        }],
        "servers": servers,
        "load_balancers": [{
            "name": "lb1", "state": null, "state_age_ms": 5, "connected": true, "alive": true,
            "connection_table_owner": 0, "address": null,
        }],
        "keys": {
            "current_key": 0, "current_since_unix_s": 1, "rotation_phase": "steady", "configuration_generation": 1,
            "pending_peers": [], "min_key_age_s": 1, "rotation_interval_s": 0,
        },
    }))
    .unwrap()
}

fn sample_loads(uptime_ms: u64, server_count: usize) -> Loads {
    let sample_server_loads_json = |number: usize| {
        json!({
            "name": format!("s{number}"), "core_loads": [0.1 * number as f64 / server_count as f64, 0.95],
            "open_connections": 9,
            "service_connections": 7, "new_connections": uptime_ms * number as u64 / 100,
        })
    };
    let servers: Vec<Value> = (1..=server_count).map(sample_server_loads_json).collect();
    let counters = json!({"new_connection": uptime_ms, "existing": 3 * uptime_ms, "drop_no_server": uptime_ms / 10});
    serde_json::from_value(json!({
        "at_unix_ms": 1, "uptime_ms": uptime_ms, "servers": servers,
        "load_balancers": [{"name": "lb1", "counters": counters}],
    }))
    .unwrap()
}

fn sample_model(server_count: usize) -> PageModel {
    let mut model = PageModel::default();
    model.apply_controller_answer(ControllerAnswer::Status(Box::new(sample_status(server_count))));
    model.apply_controller_answer(ControllerAnswer::Loads(sample_loads(1000, server_count)));
    model.apply_controller_answer(ControllerAnswer::Loads(sample_loads(2000, server_count)));
    model
}

fn rendered_page(model: &PageModel, view: &mut ServerListView, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw_page(frame, model, view)).unwrap();
    page_text(terminal.backend())
}

fn find_line_words<'a>(page: &'a str, line_start: &str) -> Vec<&'a str> {
    let line = page.lines().find(|line| line.starts_with(line_start));
    line.unwrap_or_else(|| panic!("no line {line_start:?} in\n{page}")).split_whitespace().collect()
}

#[test]
fn page_of_80_by_24_shows_all_sections() {
    let page = rendered_page(&sample_model(3), &mut ServerListView::default(), 80, 24);
    assert_eq!(
        find_line_words(&page, "web"),
        ["web", "10.200.0.1:80/tcp", "crossrss", "stateless", "1", "of", "1", "77"]
    );
    assert_eq!(find_line_words(&page, "lb1 "), ["lb1", "connected", "-", "4100", "1000", "100"]);
    assert_eq!(find_line_words(&page, "s1 "), ["s1", "active", "7", "10", "40", "ms", "49", "%", "95", "%", "▁█"]);
    assert_eq!(find_line_words(&page, "s3 ")[..4], ["s3", "draining", "7", "30"]);
    assert!(page.contains("! s3: draining: by `coreward drain`") && page.contains("! s2: aRFS is on"), "{page}");
    assert!(page.contains("6 cores, mean 51 %, highest 95 %; 60 new connections/s, 27 open"), "{page}");
    assert!(page.lines().last().unwrap().starts_with("servers 1 to 3 of 3; q quit"), "{page}");
    assert_eq!(page.lines().count(), 24);
}

#[test]
fn larger_page_shows_more_servers() {
    let model = sample_model(100);
    let mut view = ServerListView { sort_order: ServerSortOrder::Load, ..ServerListView::default() };
    let large_page = rendered_page(&model, &mut view, 200, 60);
    assert_eq!(view.visible_row_count, 60 - 3 - 2 - 2 - 2 - 1);
    let shown_servers: Vec<&str> =
        large_page.lines().filter(|line| line.starts_with('s')).filter_map(|line| line.split(' ').next()).collect();
    assert_eq!((shown_servers[2], shown_servers[3]), ("s100", "s99"), "after the headings: {large_page}");
    view.first_visible_row = 1000;
    let small_page = rendered_page(&model, &mut view, 80, 24);
    assert!(small_page.contains(" to 100 of 100; "), "{small_page}");
    view.sort_order = ServerSortOrder::NewConnections;
    view.first_visible_row = 0;
    assert_eq!(find_line_words(&rendered_page(&model, &mut view, 80, 24), "s100 ")[2..4], ["7", "1000"]);
}

#[test]
fn page_of_any_size_is_drawn_without_panic() {
    for model in [PageModel::default(), sample_model(0), sample_model(1), sample_model(300)] {
        for (width, height) in (0..40).flat_map(|width| (0..14).map(move |height| (width * 3, height))) {
            rendered_page(
                &model,
                &mut ServerListView { first_visible_row: 5, ..ServerListView::default() },
                width,
                height,
            );
        }
    }
}

#[test]
fn core_load_bars_are_grouped_to_fit_the_columns() {
    let cores: Vec<f64> = (0..64).map(|core| if core == 63 { 1.0 } else { 0.0 }).collect();
    let load_bars_text = |core_columns| load_bars(&cores, core_columns).to_string();
    assert_eq!(load_bars_text(64).chars().count(), 64);
    assert_eq!(load_bars_text(16), format!("{}█", "▁".repeat(15)));
    assert_eq!(load_bars_text(1), "█");
    assert_eq!(load_bars_text(0), "");
}

#[test]
fn no_rates_are_shown_after_a_counter_reset() {
    let mut model = sample_model(2);
    model.apply_controller_answer(ControllerAnswer::Loads(sample_loads(500, 2)));
    assert!(model.new_connection_rates_by_server().is_empty());
    assert!(rendered_page(&model, &mut ServerListView::default(), 80, 24).contains(" 0 new connections/s"));
    model.apply_controller_answer(ControllerAnswer::Problem("no controller answers".into()));
    assert!(rendered_page(&model, &mut ServerListView::default(), 80, 24).contains("no controller answers"));
}
