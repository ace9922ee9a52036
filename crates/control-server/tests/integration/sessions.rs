//! Tests that browser sessions and watchers' streams end after access is checked again.

use coreward_api::Role;
use coreward_http::tokens::token_file_path;
use nix::sys::signal::{Signal, kill};
use nix::unistd::getpid;
use reqwest::StatusCode;

use crate::support::{SIGHUP_LOCK, TestDirectory, with_timeout};

/// Begins a browser session with a token, and returns the session's cookie.
async fn begin_session(http_client: &reqwest::Client, session_url: String, token: &str) -> String {
    let login_response = http_client.post(session_url).bearer_auth(token).send().await.unwrap();
    let cookie = login_response.headers()["set-cookie"].to_str().unwrap();
    assert!(!cookie.contains("Secure"), "by plain HTTP a browser would not take it: {cookie}");
    cookie.split(';').next().unwrap().to_owned()
}

#[tokio::test]
async fn new_token_ends_the_sessions_of_the_old_token() {
    let _sighup_guard = SIGHUP_LOCK.lock().await;
    let test_directory = TestDirectory::new(&["s1"], "[[service]]\nname = \"web\"\nvip = \"10.200.0.1:80\"\n");
    let controller = test_directory.start_controller().await;
    let http_client = reqwest::Client::builder().no_proxy().build().unwrap();
    let build_url = |path: &str| format!("http://{}/v1/{path}", controller.api_address);
    let token_path = token_file_path(test_directory.temporary_directory.path(), Role::Viewer);
    let old_token = std::fs::read_to_string(&token_path).unwrap().trim().to_owned();

    let cookie = begin_session(&http_client, build_url("session"), &old_token).await;
    let send_with_cookie =
        async |request: reqwest::RequestBuilder| request.header("cookie", &cookie).send().await.unwrap();
    assert_eq!(send_with_cookie(http_client.get(build_url("health"))).await.status(), StatusCode::OK);
    let second_login = send_with_cookie(http_client.post(build_url("session"))).await;
    assert_eq!(second_login.status(), StatusCode::FORBIDDEN, "a session that begins sessions never ends");
    let mut watch_response = [
        http_client.get(build_url("watch")).bearer_auth(&old_token).send().await.unwrap(),
        send_with_cookie(http_client.get(build_url("watch"))).await,
    ];

    // The tokens are the same. A stream ends, because its user may have been revoked, but a session continues.
    kill(getpid(), Signal::SIGHUP).unwrap();
    with_timeout("the stream's end", async { while watch_response[1].chunk().await.unwrap().is_some() {} }).await;
    assert_eq!(send_with_cookie(http_client.get(build_url("health"))).await.status(), StatusCode::OK);
    watch_response[1] = send_with_cookie(http_client.get(build_url("watch"))).await;

    std::fs::remove_file(&token_path).unwrap();
    kill(getpid(), Signal::SIGHUP).unwrap();
    for watch in &mut watch_response {
        with_timeout("the stream's end", async { while watch.chunk().await.unwrap().is_some() {} }).await;
    }
    assert_eq!(send_with_cookie(http_client.get(build_url("health"))).await.status(), StatusCode::UNAUTHORIZED);
    let health_status =
        async |token: &str| http_client.get(build_url("health")).bearer_auth(token).send().await.unwrap().status();
    assert_eq!(health_status(&old_token).await, StatusCode::UNAUTHORIZED);
    let new_token = std::fs::read_to_string(&token_path).unwrap();
    assert_eq!(health_status(new_token.trim()).await, StatusCode::OK);
}
