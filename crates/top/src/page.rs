//! Drawing of the page.

use coreward_api::types::{LoadBalancer, ReportState, Server, ServerLoads, ServerState, Service, Status};
use coreward_model::statistics::mean;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Table};

use crate::model::Model;
use crate::view::{SortOrder, View};

/// Maximum number of lines for services, for load balancers and for warnings, if servers need the room.
const MAX_MINOR_LINES: usize = 4;
/// Width of a server's line before the bars of its cores, in columns.
const COLUMNS_BEFORE_CORES: u16 = 64;

/// Draws the page; stores the number of visible servers in `view`.
pub fn draw(frame: &mut Frame<'_>, seen: &Model, view: &mut View) {
    let area = frame.area();
    let Some(status) = &seen.status else {
        let words = seen.problem.clone().unwrap_or_else(|| "asking the controller ...".to_owned());
        return frame.render_widget(Paragraph::new(words), area);
    };
    let warnings = warnings(status);
    let [services, balancers, warned] = section_heights(
        [status.services.len() + 1, status.load_balancers.len() + 1, warnings.len()],
        status.servers.len(),
        area,
    );
    let rows = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(services),
        Constraint::Length(balancers),
        Constraint::Min(0),
        Constraint::Length(warned),
        Constraint::Length(1),
    ]);
    let [head, services, balancers, servers, warned, foot] = rows.areas(area);
    frame.render_widget(Paragraph::new(header_lines(seen, status, view.order)), head);
    frame.render_widget(services_table(status, services), services);
    frame.render_widget(balancers_table(seen, status, balancers), balancers);
    view.page_size = usize::from(servers.height.saturating_sub(1));
    view.first_row = view.first_row.min(status.servers.len().saturating_sub(view.page_size));
    frame.render_widget(servers_table(seen, status, *view, servers), servers);
    let warn = Style::new().fg(Color::Yellow);
    let lines: Vec<Line<'_>> = warnings.into_iter().map(|warning| Line::styled(format!("! {warning}"), warn)).collect();
    frame.render_widget(Paragraph::new(lines), warned);
    frame.render_widget(Paragraph::new(footer_line(status, *view)), foot);
}

pub fn full_height(status: &Status) -> u16 {
    let lines = 6 + status.services.len() + status.load_balancers.len() + warnings(status).len() + status.servers.len();
    u16::try_from(lines).unwrap_or(u16::MAX)
}

/// Returns the heights of services, load balancers and warnings: all lines, or else [`MAX_MINOR_LINES`], or fewer on a
/// small page. Three lines are head and foot.
fn section_heights(needed: [usize; 3], servers: usize, area: Rect) -> [u16; 3] {
    let mut room = usize::from(area.height).saturating_sub(3);
    let all = needed.iter().sum::<usize>() + servers + 1;
    let most = if all <= room { usize::MAX } else { MAX_MINOR_LINES };
    needed.map(|needed| {
        // Servers get at least half of the remaining lines.
        let height = needed.min(most).min(room / 2);
        room -= height;
        height as u16
    })
}

fn header_lines<'a>(seen: &Model, status: &Status, order: SortOrder) -> Vec<Line<'a>> {
    let fresh = status.servers.iter().filter(|server| server.reports == ReportState::Fresh).count();
    let loads: Vec<f64> = seen.servers().values().flat_map(|server| server.cores.iter().copied()).collect();
    let highest = loads.iter().copied().fold(0.0, f64::max);
    let sum: f64 = seen.new_connection_rates().values().sum();
    let open: u64 = seen.servers().values().map(|server| u64::from(server.open_connections)).sum();
    let first = format!(
        "coreward  configuration {}, a report every {} ms, {fresh} of {} servers report, by {}",
        status.configuration_generation,
        status.report_interval_ms,
        status.servers.len(),
        order.name()
    );
    let second = format!(
        "{} cores, mean {:.0} %, highest {:.0} %; {} new connections/s, {open} open",
        loads.len(),
        mean(&loads).unwrap_or(0.0) * 100.0,
        highest * 100.0,
        format_rate(sum)
    );
    let second = match &seen.problem {
        Some(problem) => Line::styled(problem.clone(), Style::new().fg(Color::Red)),
        None => Line::raw(second),
    };
    vec![Line::styled(first, Style::new().add_modifier(Modifier::BOLD)), second]
}

fn footer_line<'a>(status: &Status, view: View) -> Line<'a> {
    let (all, first) = (status.servers.len(), view.first_row);
    let last = (first + view.page_size).min(all);
    let shown = if all == 0 { String::new() } else { format!("servers {} to {last} of {all}; ", (first + 1).min(all)) };
    let keys = "q quit, arrows and PageUp/PageDown, order by l load, n name, c new connections";
    Line::styled(format!("{shown}{keys}"), Style::new().add_modifier(Modifier::DIM))
}

fn header<'a>(names: &[&'a str]) -> Row<'a> {
    Row::new(names.iter().map(|name| Cell::from(*name)).collect::<Vec<_>>())
        .style(Style::new().add_modifier(Modifier::UNDERLINED))
}

/// Returns the rows that fit into `height` - 1 lines; if rows are left out, the last line has their number.
fn rows_that_fit<'a>(rows: Vec<Row<'a>>, height: u16) -> Vec<Row<'a>> {
    let (room, all) = (usize::from(height.saturating_sub(1)), rows.len());
    if all <= room || room == 0 {
        return rows;
    }
    let more = Row::new([Cell::from(format!("... {} more", all + 1 - room))]);
    rows.into_iter().take(room - 1).chain([more]).collect()
}

fn services_table<'a>(status: &'a Status, area: Rect) -> Table<'a> {
    let row = |service: &'a Service| {
        let takes = |state: ServerState| matches!(state, ServerState::Active | ServerState::Joining);
        let up = service.members.iter().filter(|member| takes(member.state)).count();
        let style = if up == 0 { Style::new().fg(Color::Red) } else { Style::new() };
        Row::new([
            Cell::from(service.name.as_str()),
            Cell::from(service.address.to_string()),
            Cell::from(service.policy.as_str()),
            Cell::from(service.consistency.as_str()),
            Cell::from(format!("{up} of {}", service.members.len())).style(style),
            Cell::from(service.table_generation.to_string()),
        ])
    };
    let [name, policy, consistency, takes, table] = [14, 14, 11, 8, 8].map(Constraint::Length);
    let widths = [name, Constraint::Min(20), policy, consistency, takes, table];
    let rows = status.services.iter().map(row).collect();
    Table::new(rows_that_fit(rows, area.height), widths).header(header(&[
        "service",
        "address",
        "policy",
        "consistency",
        "take new",
        "table",
    ]))
}

fn balancers_table<'a>(seen: &Model, status: &'a Status, area: Rect) -> Table<'a> {
    let row = |balancer: &'a LoadBalancer| {
        let rates = seen.packet_rates(&balancer.name);
        let sum = |has_counted_connections: &dyn Fn(&str) -> bool| {
            format_rate(rates.iter().filter(|(name, _)| has_counted_connections(name)).map(|(_, rate)| rate).sum())
        };
        let (state, colour) = match (balancer.connected, balancer.alive) {
            (true, true) => ("connected", Color::Green),
            (true, false) => ("silent", Color::Red),
            (false, true) => ("disconnected", Color::Yellow),
            (false, false) => ("lost", Color::Red),
        };
        Row::new([
            Cell::from(balancer.name.as_str()),
            Cell::from(state).style(Style::new().fg(colour)),
            Cell::from(balancer.state.as_ref().map_or("-", |state| state.xdp_mode.as_str())),
            Cell::from(sum(&|_| true)),
            Cell::from(sum(&|name| name == "new_connection")),
            Cell::from(sum(&|name| name.starts_with("drop_"))),
        ])
    };
    let widths = [16, 13, 8, 11, 11, 11].map(Constraint::Length);
    let rows = status.load_balancers.iter().map(row).collect();
    Table::new(rows_that_fit(rows, area.height), widths).header(header(&[
        "load balancer",
        "state",
        "XDP",
        "packets/s",
        "first/s",
        "drops/s",
    ]))
}

fn servers_table<'a>(seen: &Model, status: &'a Status, view: View, area: Rect) -> Table<'a> {
    let (loads, rates) = (seen.servers(), seen.new_connection_rates());
    let rate = |server: &Server| rates.get(server.name.as_str()).copied();
    let load = |server: &Server| loads.get(server.name.as_str()).and_then(|loads| mean(&loads.cores));
    let mut servers: Vec<&'a Server> = status.servers.iter().collect();
    match view.order {
        SortOrder::Name => servers.sort_by(|a, b| a.name.cmp(&b.name)),
        SortOrder::Load => servers.sort_by(|a, b| load(b).unwrap_or(-1.0).total_cmp(&load(a).unwrap_or(-1.0))),
        SortOrder::NewConnections => {
            servers.sort_by(|a, b| rate(b).unwrap_or(-1.0).total_cmp(&rate(a).unwrap_or(-1.0)))
        }
    }
    let room = usize::from(area.width.saturating_sub(COLUMNS_BEFORE_CORES));
    let row = |server: &'a Server| server_row(server, loads.get(server.name.as_str()).copied(), rate(server), room);
    let rows: Vec<Row<'a>> = servers.into_iter().skip(view.first_row).take(view.page_size).map(row).collect();
    let widths = [16, 10, 8, 8, 7, 5, 5].map(Constraint::Length).into_iter().chain([Constraint::Min(0)]);
    Table::new(rows, widths)
        .column_spacing(1)
        .header(header(&["server", "state", "open", "new/s", "report", "mean", "max", "cores"]))
}

fn server_row<'a>(server: &'a Server, loads: Option<&ServerLoads>, rate: Option<f64>, room: usize) -> Row<'a> {
    let cores = loads.map_or(&[][..], |loads| &loads.cores);
    // An agent of an older version counts all connections of the machine.
    let open = loads.map(|loads| loads.service_connections.unwrap_or(loads.open_connections.into()));
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let percent = |load: f64| format!("{:.0} %", load * 100.0);
    let highest = cores.iter().copied().reduce(f64::max);
    let (age, colour) = match server.reports {
        ReportState::Fresh => (format!("{} ms", server.report_age_ms), Color::Reset),
        ReportState::Stale => (format!("{} s", server.report_age_ms / 1000), Color::Red),
        ReportState::None => ("never".to_owned(), Color::Red),
    };
    let colour_of_state = match server.state {
        ServerState::Active => Color::Green,
        ServerState::Joining | ServerState::Draining => Color::Yellow,
        ServerState::Down => Color::Red,
        ServerState::Gone => Color::DarkGray,
    };
    Row::new([
        Cell::from(server.name.as_str()),
        Cell::from(server.state.name()).style(Style::new().fg(colour_of_state)),
        Cell::from(or_dash(open.map(|open| open.to_string()))),
        Cell::from(or_dash(rate.map(format_rate))),
        Cell::from(age).style(Style::new().fg(colour)),
        Cell::from(or_dash(mean(cores).map(percent))),
        Cell::from(or_dash(highest.map(percent))),
        Cell::from(bars(cores, room)),
    ])
}

/// Returns one bar per core, or one per group of cores for the busiest core of the group.
fn bars<'a>(cores: &[f64], room: usize) -> Line<'a> {
    if cores.is_empty() || room == 0 {
        return Line::default();
    }
    let together = cores.len().div_ceil(room);
    let highest = |cores: &[f64]| cores.iter().copied().fold(0.0, f64::max);
    cores.chunks(together).map(|cores| bar(highest(cores))).collect::<Vec<_>>().into()
}

fn bar<'a>(load: f64) -> Span<'a> {
    const BARS: [&str; 8] = ["▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"];
    let colour = match load {
        ..0.7 => Color::Green,
        0.7..0.9 => Color::Yellow,
        _ => Color::Red,
    };
    Span::styled(BARS[((load * 8.0) as usize).min(BARS.len() - 1)], Style::new().fg(colour))
}

/// Formats a rate as "0.3", "12" or "3.4k".
fn format_rate(rate: f64) -> String {
    match rate {
        ..0.05 => "0".to_owned(),
        0.05..9.95 => format!("{rate:.1}"),
        9.95..9_999.5 => format!("{rate:.0}"),
        9_999.5..999_950.0 => format!("{:.1}k", rate / 1e3),
        _ => format!("{:.1}M", rate / 1e6),
    }
}

fn warnings(status: &Status) -> Vec<String> {
    let services = status.services.iter().flat_map(|of| of.warnings.iter().map(|text| format!("{}: {text}", of.name)));
    let balancers = status.load_balancers.iter().flat_map(|of| {
        let state = of.state.iter().flat_map(|state| &state.warnings);
        state.map(|text| format!("{}: {text}", of.name))
    });
    let states =
        status.servers.iter().filter(|server| server.state != ServerState::Active && !server.state_reason.is_empty());
    let states = states.map(|server| format!("{}: {}: {}", server.name, server.state, server.state_reason));
    let servers = status.servers.iter().flat_map(|of| of.warnings.iter().map(|text| format!("{}: {text}", of.name)));
    services.chain(balancers).chain(states).chain(servers).collect()
}

#[cfg(test)]
mod tests;
