import { Article } from "./article.js";

const article = new Article(scales);
document.querySelector("main").replaceChildren(article.element);
article.show(JSON.parse(document.getElementById("trajectory").textContent));
