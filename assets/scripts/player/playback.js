// Playing a run that may still be generated: to pause is to hold it on the server, a step beyond its end is one of the model.

import { trigger } from "component";

export class Playback {
  constructor(app) {
    this.app = app;
    this.begin();
  }

  /** Another run is shown. */
  begin() {
    this.asked = null; // "hold" or "resume", sent to the server and not yet confirmed
    this.stepping = false;
  }

  /** The shown run has new events. */
  follow(outcome) {
    const { trace, player } = this.app;
    if (trace.state === "running" && this.asked === "resume") this.asked = null;
    if (trace.state === "held" && this.asked === "hold") this.asked = null;
    if (!this.stepping || outcome !== "more" || player.atEnd) return;
    this.stepping = false;
    player.forward();
  }

  /** Whether the shown run is on the server and can be held and resumed. */
  get running() {
    return !this.app.trace.over && !this.app.trace.fromFile && this.app.trace.lanes.length > 0;
  }

  get held() {
    return this.asked === "hold" || (this.app.trace.state === "held" && this.asked !== "resume");
  }

  playOrPause() {
    if (this.app.player.playing) {
      this.pause();
      return;
    }
    this.resume();
    this.app.player.play();
  }

  pause() {
    this.app.player.pause();
    if (!this.running || this.held) return;
    this.asked = "hold";
    trigger("hold", {});
  }

  /** The visitor has stopped the run: a text that is still being played rests where it is read. */
  stop() {
    if (this.app.player.speed !== "live") this.app.player.pause();
  }

  resume() {
    this.stepping = false;
    if (!this.running || !this.held) return;
    this.asked = "resume";
    trigger("resume", {});
  }

  stepBack() {
    this.stepping = false;
    this.pause();
    this.app.player.back();
  }

  stepForward() {
    this.pause();
    if (this.app.player.forward() || !this.running) return;
    this.stepping = true;
    trigger("step", {});
  }

  goToStart() {
    this.stepping = false;
    this.pause();
    this.app.player.toStart();
  }

  goToEnd() {
    if (this.running) this.followLive();
    else this.showEnd();
  }

  followLive() {
    this.resume();
    this.app.speed.value = "live";
    this.app.player.follow();
  }

  showEnd() {
    this.app.player.pause();
    this.app.player.toHead();
  }

  seek(value) {
    this.stepping = false;
    this.app.player.seek(value);
  }

  seekEvent(lane, index) {
    this.stepping = false;
    this.pause();
    this.app.player.seekEvent(lane, index);
  }
}
